"""A DeepSpeed newer than those tested: used with a message, or refused with the missing names."""

from __future__ import annotations

import pytest
from deepspeed.runtime.pipe.engine import PipelineEngine

from harness.engine.deepspeed_0_19 import contract
from harness.engine.deepspeed_0_19.patches import PATCHES
from harness.errors import ConfigError

NAMES = [patch.names for patch in PATCHES]


def said(monkeypatch: pytest.MonkeyPatch, installed: str) -> list[str]:
    monkeypatch.setattr(contract, "version", lambda name: installed)
    lines: list[str] = []
    contract.require_contract(NAMES, lines.append)
    return lines


def test_a_tested_release_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(monkeypatch, "0.19.8") == said(monkeypatch, "0.19.99") == []


def test_a_newer_one_runs_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = said(monkeypatch, "0.20.0")
    assert line.startswith("deepspeed 0.20.0 is newer than 0.19, the newest tested")


def test_a_newer_one_is_refused_with_the_name_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(PipelineEngine, "_exec_schedule")
    with pytest.raises(ConfigError, match=r"1\.0\.0 has no \S+PipelineEngine\._exec_schedule, "):
        said(monkeypatch, "1.0.0")


def test_names_of_patches_are_found_or_belong_to_objects() -> None:
    names = [name for row in NAMES for name in contract._static(row)]
    assert len(names) >= 8
    assert [name for name in names if not contract._is_there(name)] == []
    assert not contract._is_there("deepspeed.comm.torch.no_such_name")
    assert not contract._is_there("deepspeed.no_such_module.name")
