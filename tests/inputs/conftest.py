import shutil
from collections.abc import Iterator
from pathlib import Path

import deepspeed
import huggingface_hub.constants
import pytest
import torch

from harness.launch.fork_server import share_gloo_threads
from tests.inputs.rule import SECRET
from tests.real_runs import write_corpus

share_gloo_threads()  # engines of past runs keep their groups: hundreds of threads that tick


@pytest.fixture(scope="package", autouse=True)
def process_group() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        deepspeed.comm.destroy_process_group()  # torch's leaves DeepSpeed the groups of the past


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with a corpus and a file that no input may copy. It has the same
    path in each test: libraries remember absolute paths of relative ones (fsspec).
    """
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    folder = tmp_path_factory.getbasetemp() / "current"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    monkeypatch.chdir(folder)
    write_corpus(Path("corpus"), documents=30)
    Path("secret.txt").write_text(f"{SECRET}\n")
    return folder
