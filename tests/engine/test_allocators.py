"""Settings of memory allocators: torch's, which also apply on CPUs, and glibc's."""

import platform
from pathlib import Path

import pytest
import torch

from harness.engine.allocators import MALLOC_VARIABLES, set_allocators
from harness.layout.world import World
from tests.run_tools import printed
from tests.tables import beside

OURS = "expandable_segments:True,pinned_max_cached_size_mb:64"
SCRIPTS, TABLES = beside(__file__, "scripts.toml"), beside(__file__, "allocators.toml")


@pytest.mark.gate("engine")
def test_allocator_settings_are_accepted_by_torch() -> None:
    """In a separate process, since torch keeps its settings."""
    message = f"torch's allocators are set to {OURS} (PYTORCH_ALLOC_CONF)"
    assert printed(SCRIPTS["sets"]).splitlines() == [message, OURS]


@pytest.mark.parametrize(("of_user", "unknown", "expected"), TABLES["older"])
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
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[always]" in setting.read_text()


@pytest.mark.gate("engine")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.skipif(_maps_huge_pages(), reason="the kernel maps 2 MiB at a time")
@pytest.mark.parametrize(("of_user", "message"), TABLES["malloc"])
def test_a_cpu_rank_maps_no_page_twice(of_user: list[str], message: str) -> None:
    """Cases with an unchanged malloc show that the kernel maps freed pages again."""
    variables: dict[str, str | None] = dict.fromkeys(MALLOC_VARIABLES)
    variables |= {name: value for name, _, value in (text.partition("=") for text in of_user)}
    event, faults = printed(SCRIPTS["faults"], **variables).splitlines()
    assert event == message
    assert int(faults) < 100 if "keeps" in message else int(faults) > 5000, faults
