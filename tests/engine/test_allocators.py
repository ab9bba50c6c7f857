"""Settings of memory allocators: torch's, which also apply on CPUs, and glibc's."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.engine.allocators import MALLOC_VARIABLES, set_allocators
from harness.layout.world import World
from tests.real_runs import REPOSITORY, environment
from tests.run_tools import printed

OURS = "expandable_segments:True,pinned_max_cached_size_mb:64"
SETS = """
from harness.engine.allocators import set_allocators
from harness.layout.world import World
import torch
print(set_allocators(World(accelerator="cuda"))["message"])
print(torch._C._accelerator_getAllocatorSettings())
"""


@pytest.mark.gate("engine")
def test_allocator_settings_are_accepted_by_torch() -> None:
    """In a separate process, since torch keeps its settings."""
    message = f"torch's allocators are set to {OURS} (PYTORCH_ALLOC_CONF)"
    assert printed(SETS).splitlines() == [message, OURS]


@pytest.mark.parametrize(
    ("of_user", "unknown", "expected"),
    [
        (None, "pinned", "set to expandable_segments:True ("),
        (None, "expandable", "unchanged: this torch"),
        ("PYTORCH_ALLOC_CONF=x:1", "", "PYTORCH_ALLOC_CONF=x:1 is set by the user and left"),
    ],
)
def test_older_torch_gets_known_allocator_settings_only(
    of_user: str | None, unknown: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settle(settings: str) -> None:
        assert of_user is None
        if unknown in settings:
            raise ValueError(f"Unrecognized key {unknown!r} in CUDA allocator config.")

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settle)
    assert expected in set_allocators(World(accelerator="cuda", allocators=of_user))["message"]


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


KEPT = "malloc keeps freed memory for the next step (MALLOC_TRIM_THRESHOLD_)"
TRIM, PERTURB = "MALLOC_TRIM_THRESHOLD_=131072", "GLIBC_TUNABLES=glibc.malloc.perturb=0"


@pytest.mark.gate("engine")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.skipif(_maps_huge_pages(), reason="the kernel maps 2 MiB at a time")
@pytest.mark.parametrize(
    ("of_user", "message"),
    [
        ([], KEPT),
        ([TRIM], f"malloc is unchanged: {TRIM} is set by the user"),
        ([PERTURB], f"malloc is unchanged: {PERTURB} is set by the user"),
        (["GLIBC_TUNABLES=glibc.rtld.nns=4", "LD_PRELOAD="], KEPT),
    ],
)
def test_a_cpu_rank_maps_no_page_twice(of_user: list[str], message: str) -> None:
    """Cases with an unchanged malloc show that the kernel maps freed pages again."""
    variables: dict[str, str | None] = dict.fromkeys(MALLOC_VARIABLES)
    variables |= {name: value for name, _, value in (text.partition("=") for text in of_user)}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS],
        cwd=REPOSITORY,
        env=environment(DS_ACCELERATOR="cpu", **variables),
        capture_output=True,
        text=True,
        check=True,
    )
    event, faults = done.stdout.splitlines()
    assert event == message
    if message == KEPT:
        assert int(faults) < 100
    else:
        assert int(faults) > 5000, faults
