"""A model to adapt, and what its runs are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.short_run import train
from tests.two_ranks import SMALL_MODEL
from tools.proofs.zygote import Zygote


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory, data: list[str], zygote: Zygote) -> Path:
    """A model with its tokenizer, as a run exported it."""
    run = tmp_path_factory.mktemp("base") / "run"
    train(zygote, "zero1", run, *SMALL_MODEL, *data, "save.export=true")
    return run / "export"


@pytest.fixture(scope="session")
def lora_words(base: Path, data: list[str]) -> list[str]:
    """Arguments of a run that trains adapters of that model."""
    return [
        *data,
        *(f"model.name={base}", f"model.init_from={base}", "model.lora.rank=4"),
        *("optim.schedule=constant", "optim.lr=0.01", "save.every=2"),
    ]
