"""On two ranks: JSONs train as their plans say, and a refusal is one report on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.launch.fork_server import Zygote
from harness.runfolder import RunFolder
from tests.engine.small import MODEL
from tests.two_ranks import SHORT_RUN, SMALL_MODEL, events

BF16 = {"enabled": True}
BF16_STATES = {**BF16, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


def trained(
    zygote: Zygote, folder: Path, data: list[str], ds: dict[str, Any]
) -> tuple[list[float], RunFolder]:
    """Return the losses of three steps with a JSON."""
    folder.mkdir()
    (folder / "ds.json").write_text(json.dumps(ds))
    words = [*SMALL_MODEL, *SHORT_RUN, "train.steps=3", "ds.bf16.enabled=true"]
    words += [*data, f"run.dir={folder / 'run'}"]
    ended = zygote.run(["--deepspeed", str(folder / "ds.json"), *words], folder / "logs")
    assert ended.codes == [0, 0], ended.output
    run = RunFolder(folder / "run")
    return [line["loss"] for line in run.read_metrics() if line.get("loss") is not None], run


@pytest.mark.gate("plan")
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


@pytest.mark.gate("plan")
def test_stage_0_in_bf16_is_stage_1_and_an_event(
    zygote: Zygote, data: list[str], tmp_path: Path
) -> None:
    ds = {"bf16": BF16, "zero_optimization": {"stage": 0}}
    losses, run = trained(zygote, tmp_path / "zero", data, ds)
    (event,) = events(run, "changed")
    assert event["json_key"] == "zero_optimization.stage"
    ds = {"bf16": BF16, "zero_optimization": {"stage": 1}}
    assert losses == trained(zygote, tmp_path / "one", data, ds)[0]


@pytest.mark.parametrize("mistake", ["a value that transformers refuses", "a pointer for weights"])
def test_what_only_a_run_finds_is_one_report_on_every_rank_before_anything_is_built(
    mistake: str, zygote: Zygote, data: list[str], tmp_path: Path
) -> None:
    words = [*data, *SMALL_MODEL, *SHORT_RUN, f"run.dir={tmp_path / 'run'}"]
    if mistake == "a pointer for weights":
        pointer = tmp_path / "model.safetensors"
        (tmp_path / "config.json").write_text(json.dumps(MODEL))
        pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5\n")
        words = [word for word in words if not word.startswith("model.")]
        words += [f"model.name={tmp_path}", f"model.init_from={tmp_path}"]
        expected = f"{pointer} has {pointer.stat().st_size} bytes"
    else:
        words += ["model.overrides.hidden_act=silu_"]
        expected = "cannot train: model.name=tiny: transformers cannot build it"
    ended = zygote.run(words, tmp_path / "logs")
    assert ended.codes == [2, 2], ended.output
    for output in ended.outputs:
        assert expected in output
        assert "Traceback" not in output
    assert not (tmp_path / "run").exists()
