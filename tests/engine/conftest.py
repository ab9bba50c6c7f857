from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.models.initialize import materialize
from harness.models.skeleton import hf_config, skeleton
from tests.engine.small import MODEL
from tests.two_ranks import REPOSITORY, Ended, run_ranks


@pytest.fixture(scope="session")
def drawn_weights() -> dict[str, torch.Tensor]:
    """The initial weights, drawn by one process alone."""
    model = skeleton(hf_config(MODEL), torch.float32)
    materialize(model, 0, torch.device("cpu"))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="session")
def given_weights(drawn_weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights that no seed gives."""
    return {name: tensor + 0.125 for name, tensor in drawn_weights.items()}


@pytest.fixture(scope="session")
def two_rank_folder(
    tmp_path_factory: pytest.TempPathFactory, given_weights: dict[str, torch.Tensor]
) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    (folder / "config.json").write_text(json.dumps(MODEL))
    incomplete = {n: t for n, t in given_weights.items() if "layers.1.mlp.up" not in n}
    for name, weights in (("given", given_weights), ("incomplete", incomplete)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(MODEL))
        save_file(weights, folder / name / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def two_ranks(two_rank_folder: Path) -> Ended:
    """All checks of two_rank_checks.py, run once on two ranks."""
    command = [sys.executable, "-m", "tests.engine.two_rank_checks", two_rank_folder]
    return run_ranks(command, two_rank_folder, env={"PYTHONPATH": str(REPOSITORY)})


@pytest.fixture(scope="session")
def result(two_ranks: Ended, two_rank_folder: Path) -> Callable[[str], list[Any]]:
    """What a check returned on each rank."""

    def read(check: str) -> list[Any]:
        found = []
        for rank in (0, 1):
            path = two_rank_folder / f"{check}.{rank}.json"
            assert path.exists(), (
                f"{check} never ended; codes {two_ranks.codes}\n{two_ranks.output}"
            )
            values = json.loads(path.read_text())
            assert "error" not in values, values["error"]
            found.append(values["value"])
        return found

    return read


@pytest.fixture(scope="session")
def tensors(
    result: Callable[[str], list[Any]], two_rank_folder: Path
) -> Callable[[str, str], dict[str, torch.Tensor]]:
    """The weights that a check wrote under a name."""

    def read(check: str, name: str) -> dict[str, torch.Tensor]:
        result(check)
        return load_file(two_rank_folder / f"{name}.safetensors")

    return read
