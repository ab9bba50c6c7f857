"""Settings of torch's memory allocators, which torch takes on CPUs, too."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from harness.engine.allocators import set_allocators
from harness.layout.world import World
from tests.two_ranks import REPOSITORY, environment

# In a process of its own: what torch takes stays.
SETS = """
from harness.engine.allocators import set_allocators
from harness.layout.world import World
import torch
print(set_allocators(World.from_environ())["message"])
print(torch._C._accelerator_getAllocatorSettings())
"""
OURS = "expandable_segments:True,pinned_max_cached_size_mb:64"


@pytest.mark.parametrize(
    ("variable", "message", "settings"),
    [
        (None, f"torch's allocators are set to {OURS} (PYTORCH_ALLOC_CONF)", OURS),
        (
            "max_split_size_mb:512",
            "PYTORCH_ALLOC_CONF=max_split_size_mb:512 is the user's, and left as it is",
            "max_split_size_mb:512",
        ),
    ],
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
    [("pinned", "set to expandable_segments:True ("), ("expandable", "as they were: this torch")],
)
def test_an_older_torch_gets_what_it_knows(
    unknown: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settle(settings: str) -> None:
        if unknown in settings:
            raise ValueError(f"Unrecognized key {unknown!r} in CUDA allocator config.")

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settle)
    assert expected in set_allocators(World(accelerator="cuda"))["message"]
