"""JSONs as people have them, trained on two ranks: what the plan says of them is so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.runfolder import RunFolder
from tests.two_ranks import SHORT_RUN, SMALL_MODEL, events
from tools.proofs.zygote import Zygote

pytestmark = pytest.mark.slow
BF16_STATES = {
    "enabled": True,
    "bf16_master_weights_and_grads": True,
    "bf16_optimizer_states": True,
}


def trained(
    zygote: Zygote, folder: Path, data: list[str], ds: dict[str, Any]
) -> tuple[list[float], RunFolder]:
    """The losses of three steps with a JSON."""
    folder.mkdir()
    (folder / "ds.json").write_text(json.dumps(ds))
    words = [*SMALL_MODEL, *SHORT_RUN, "train.steps=3", "ds.bf16.enabled=true"]
    words += [*data, f"run.dir={folder / 'run'}"]
    ended = zygote.run(["--deepspeed", str(folder / "ds.json"), *words], folder / "logs")
    assert ended.codes == [0, 0], ended.output
    run = RunFolder(folder / "run")
    return [line["loss"] for line in run.read_metrics() if line.get("loss") is not None], run


def test_torch_autocast_to_bf16_over_bf16_changes_nothing(
    zygote: Zygote, data: list[str], tmp_path: Path
) -> None:
    """DeepSpeed's own example of master weights in bf16 has both."""
    ds = {"bf16": BF16_STATES, "zero_optimization": {"stage": 3}}
    losses, _ = trained(zygote, tmp_path / "without", data, ds)
    autocast = {"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}}
    with_autocast, run = trained(zygote, tmp_path / "with", data, ds | autocast)
    plan = run.read_plan()
    assert plan is not None
    assert plan["deepspeed"]["torch_autocast"]["enabled"]
    assert len(losses) == 3
    assert with_autocast == losses


def test_stage_0_in_bf16_is_stage_1_and_an_event(
    zygote: Zygote, data: list[str], tmp_path: Path
) -> None:
    losses, run = trained(
        zygote,
        tmp_path / "zero",
        data,
        {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}},
    )
    (event,) = events(run, "changed")
    assert event["json_key"] == "zero_optimization.stage"
    bf16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    assert losses == trained(zygote, tmp_path / "one", data, bf16)[0]


def test_a_model_that_transformers_cannot_build_is_one_report_on_every_rank(
    zygote: Zygote, data: list[str], tmp_path: Path
) -> None:
    words = [*data, *SMALL_MODEL, *SHORT_RUN, f"run.dir={tmp_path / 'run'}"]
    ended = zygote.run([*words, "model.overrides.hidden_act=silu_"], tmp_path / "logs")
    assert ended.codes == [2, 2], ended.output
    for output in ended.outputs:
        assert "cannot train: model.name=tiny: transformers cannot build it" in output
        assert "Traceback" not in output
    assert not (tmp_path / "run").exists()
