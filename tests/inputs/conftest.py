from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch

from tests.inputs.rule import SECRET
from tests.real_runs import write_corpus


@pytest.fixture(scope="package", autouse=True)
def process_group() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with a corpus and a file that no input may copy."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    (tmp_path / "input").mkdir()
    monkeypatch.chdir(tmp_path / "input")
    write_corpus(Path("corpus"), documents=30)
    Path("secret.txt").write_text(f"{SECRET}\n")
    return Path.cwd()
