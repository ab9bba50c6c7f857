"""Settings of memory allocators: torch's, which also apply on CPUs, and glibc's."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.engine.allocators import MALLOC_VARIABLES, set_allocators
from harness.layout.world import World
from tests.real_runs import REPOSITORY, environment
from tests.tiers import rest_in_gate

# In a separate process, since torch keeps its settings.
SETS = """
from harness.engine.allocators import set_allocators
from harness.layout.world import World
import torch
print(set_allocators(World.from_environ())["message"])
print(torch._C._accelerator_getAllocatorSettings())
"""
OURS = "expandable_segments:True,pinned_max_cached_size_mb:64"


@pytest.mark.gate("engine")
@pytest.mark.parametrize(
    ("variable", "message", "settings"),
    rest_in_gate(
        "engine",
        [
            (None, f"torch's allocators are set to {OURS} (PYTORCH_ALLOC_CONF)", OURS),
            (
                "max_split_size_mb:512",
                "PYTORCH_ALLOC_CONF=max_split_size_mb:512 is set by the user and left unchanged",
                "max_split_size_mb:512",
            ),
        ],
    ),
)
def test_torch_takes_the_settings_unless_the_user_has_some(
    variable: str | None, message: str, settings: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SETS],
        cwd=REPOSITORY,
        env=environment(DS_ACCELERATOR="cuda", PYTORCH_ALLOC_CONF=variable),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [message, settings]


@pytest.mark.parametrize(
    ("unknown", "expected"),
    [("pinned", "set to expandable_segments:True ("), ("expandable", "unchanged: this torch")],
)
def test_an_older_torch_gets_what_it_knows(
    unknown: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settle(settings: str) -> None:
        if unknown in settings:
            raise ValueError(f"Unrecognized key {unknown!r} in CUDA allocator config.")

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settle)
    assert expected in set_allocators(World(accelerator="cuda"))["message"]


def _maps_huge_pages() -> bool:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False
    return "[always]" in text


# Like a step: large blocks are freed while others are kept, with a bucket of 2 GB, as ZeRO 1 makes
# it, that is almost empty.
FAULTS = """
import resource
import torch
from harness.engine.allocators import set_allocators
from harness.layout.world import World
print(set_allocators(World())["message"])
def step():
    kept = torch.ones(2**20)
    bucket = torch.empty(500_000_000)
    bucket[: 2**23] = 1
    for _ in range(4):
        freed = [torch.ones(2**18) for _ in range(32)]
        del freed
for _ in range(6):  # the first of them divide the heap into the blocks that the others find
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.gate("engine")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.skipif(_maps_huge_pages(), reason="the kernel maps 2 MiB at a time")
@pytest.mark.parametrize(
    ("of_user", "message", "most"),
    rest_in_gate(
        "engine",
        [
            ({}, "malloc keeps freed memory for the next step (MALLOC_TRIM_THRESHOLD_)", 100),
            (
                {"MALLOC_TRIM_THRESHOLD_": "131072"},
                "malloc is unchanged: MALLOC_TRIM_THRESHOLD_=131072 is set by the user",
                None,
            ),
            (
                {"GLIBC_TUNABLES": "glibc.malloc.perturb=0"},
                "malloc is unchanged: GLIBC_TUNABLES=glibc.malloc.perturb=0 is set by the user",
                None,
            ),
            (
                {"GLIBC_TUNABLES": "glibc.rtld.nns=4", "LD_PRELOAD": ""},
                "malloc keeps freed memory for the next step (MALLOC_TRIM_THRESHOLD_)",
                100,
            ),
        ],
    ),
)
def test_a_cpu_rank_maps_no_page_twice(
    of_user: dict[str, str], message: str, most: int | None
) -> None:
    """Cases with an unchanged malloc show that the kernel maps freed pages again."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS],
        cwd=REPOSITORY,
        env=environment(DS_ACCELERATOR="cpu", **{**dict.fromkeys(MALLOC_VARIABLES), **of_user}),
        capture_output=True,
        text=True,
        check=True,
    )
    event, faults = done.stdout.splitlines()
    assert event == message
    if most is None:
        assert int(faults) > 5000, faults
    else:
        assert int(faults) < most
