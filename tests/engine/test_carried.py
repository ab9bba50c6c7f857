"""States that are carried from window to window: in the real engine on two ranks, equal loops whose
gradients end where windows begin, over single tokens or with transformers' own cache.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from harness.models.initialize import materialize
from harness.models.skeleton import hf_config, skeleton
from tests.engine.results import Result, results_of
from tests.engine.streams import MAMBA2, MODEL, STEPS, CacheLoop, TokenLoop
from tests.two_ranks import run_ranks

pytestmark = pytest.mark.slow

LR = 0.05
MODELS = {"lstm": MODEL, "gru": {**MODEL, "cell": "gru"}, "mamba2": MAMBA2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("carried")
    for kind, config in MODELS.items():
        (folder / kind).mkdir()
        (folder / kind / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def checked(folder: Path) -> Result:
    command = [sys.executable, "-m", "tests.engine.carried_checks", folder]
    return results_of(run_ranks(command, folder), folder)


def loop_of(kind: str) -> TokenLoop:
    model = skeleton(hf_config(MODELS[kind]), torch.float32, "eager")
    materialize(model, 0, torch.device("cpu"))
    if kind == "mamba2":
        return CacheLoop(model.train())
    return TokenLoop({name: w.detach() for name, w in model.named_parameters()}, kind)


@pytest.mark.parametrize(("kind", "layouts"), [("lstm", 5), ("gru", 1), ("mamba2", 1)])
def test_every_layout_learns_as_a_loop(
    kind: str, layouts: int, checked: Result, folder: Path
) -> None:
    loop = loop_of(kind)
    losses = []
    for step in range(STEPS):
        loss = loop.loss(step)
        loss.backward()
        losses.append(loss.item())
        loop.step(LR)
    loop.loss(STEPS).backward()
    names = [name for name in checked("trained")[0] if name.startswith(kind)]
    assert len(names) == layouts
    for name in names:
        for of_rank in checked("trained"):
            assert of_rank[name] == pytest.approx(losses, rel=1e-5), name
        gradients = load_file(folder / f"gradients-{name}.safetensors")
        assert gradients.keys() == loop.weights.keys()
        for parameter, gradient in gradients.items():
            expected = loop.weights[parameter].grad
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_windows_with_a_carried_state_are_one_long_window(checked: Result) -> None:
    for windows, long in checked("one_long_window"):
        assert windows == pytest.approx(long, rel=1e-6)


def test_a_step_that_fp16_skips_was_read(checked: Result) -> None:
    windows: list[int] = []
    for of_rank in checked("overflowed"):
        assert [applied for applied, _, _ in of_rank] == [False, False]
        assert all(is_finite for _, is_finite, _ in of_rank)
        windows += [window for part in of_rank[-1][2] for window in part]
    assert sorted(windows) == [1, 4, 7, 10, 13, 16, 19, 22]
