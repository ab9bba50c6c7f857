from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.models.initialize import materialize
from harness.models.skeleton import hf_config, skeleton
from tests.engine.results import Result, results_of
from tests.engine.small import MODEL
from tests.two_ranks import run_ranks

# The files whose checks share a folder with the weights below. Importing one would join its ranks.
_TWO_RANK_CHECKS = {
    check: path.stem
    for subject in (
        *("two_rank", "pipeline", "chunked", "expert", "bad_step"),
        *("optimizer", "stream", "traffic"),
    )
    for path in [Path(__file__).with_name(f"{subject}_checks.py")]
    if path.exists()
    for check in re.findall(r"^def (\w+)\(", path.read_text(), re.MULTILINE)
}


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
def result(two_rank_folder: Path) -> Result:
    """Return a check's result on each rank. Each file of checks is launched once, when asked for.

    Each check returns plain values, which its test judges: every rank writes FOLDER/NAME.RANK.json.
    Weights go to FOLDER/NAME.safetensors.
    """

    @functools.cache
    def launched(module: str) -> Result:
        command = [sys.executable, "-m", f"tests.engine.{module}", two_rank_folder]
        return results_of(run_ranks(command, two_rank_folder), two_rank_folder)

    return lambda check: launched(_TWO_RANK_CHECKS[check])(check)


@pytest.fixture(scope="session")
def tensors(
    result: Callable[[str], list[Any]], two_rank_folder: Path
) -> Callable[[str, str], dict[str, torch.Tensor]]:
    """The weights that a check wrote under a name."""

    def read(check: str, name: str) -> dict[str, torch.Tensor]:
        result(check)
        return load_file(two_rank_folder / f"{name}.safetensors")

    return read
