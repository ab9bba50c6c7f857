"""DeepSpeed JSONs in common use: one of each kind, in the style of the projects named, that pass
unchanged; their monitors; and runs on two ranks. Refusals are in refusals/json.toml. Of 140
real files with 'auto' from 29 public repositories, 130 pass; these examples have their keys.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.launch.fork_server import Zygote
from harness.run.dry_run import dry_run
from harness.runfolder import RunFolder
from tests.engine.small import MODEL
from tests.plan.conftest import Packages
from tests.plan.plans import Planner
from tests.real_runs import SHORT_RUN, SMALL_MODEL, events
from tests.tables import beside

H100 = "RANKS=8 GPU='NVIDIA H100 80GB HBM3'"
SHAPES = beside(__file__, "ds_shapes.toml")
PACKAGES = SHAPES.pop("packages")


@pytest.mark.parametrize("name", SHAPES)
def test_a_json_as_people_have_it_passes_unchanged(name: str, planned: Planner) -> None:
    ds, note = SHAPES[name]["json"], SHAPES[name].get("note")
    plan = planned(H100, ds)
    assert '"auto"' not in json.dumps({**plan.deepspeed, "zero_optimization": {}})
    kinds = {"adopted", "fallback", "changed", "chosen"}
    notes = [row for row in dry_run(plan).text().splitlines() if row.startswith("note ")]
    if note is None:
        assert {event["kind"] for event in plan.events} <= kinds, notes
    else:
        assert any(note in row for row in notes), notes


MONITORS = ("tensorboard", "wandb", "mlflow", "comet_ml")


def test_missing_packages_are_problems_of_one_report(packages: Packages, planned: Planner) -> None:
    packages(*MONITORS, none=True)
    monitors = {"tensorboard": {"enabled": True, "output_path": "x"}, "comet": {"enabled": True}}
    words = "log.tensorboard=true log.wandb=p log.mlflow=e"
    assert set(planned.problems(words, monitors)) == {
        f"{key}: it needs the package {package}: pip install {package}"
        for key, package in PACKAGES.items()
    }
    made = planned("", {"tensorboard": {"enabled": False}})
    assert made.config.log.tensorboard is False


def test_monitor_without_own_place_becomes_a_tracker(packages: Packages, planned: Planner) -> None:
    packages(*MONITORS)
    ds = {"tensorboard": {"enabled": True}, "wandb": {"enabled": True, "project": "p", "team": "t"}}
    made = planned("", ds)
    assert (made.config.log.tensorboard, made.config.log.wandb) == (True, "t/p")
    assert not made.deepspeed["tensorboard"]["enabled"]
    assert not made.deepspeed["wandb"]["enabled"]
    notes = "\n".join(planned.notes("", ds))
    assert "tensorboard.enabled is False, not True" in notes
    assert "log.wandb=t/p" in notes
    # The user's own tracker has priority and is written once.
    made = planned("log.wandb=mine", {"wandb": {"enabled": True}})
    assert (made.config.log.wandb, made.deepspeed["wandb"]["enabled"]) == ("mine", False)


def test_monitor_with_its_own_place_stays_deepspeeds(packages: Packages, planned: Planner) -> None:
    packages(*MONITORS)
    ds = {
        "tensorboard": {"enabled": True, "output_path": "/logs"},
        "wandb": {"enabled": True, "group": "g"},
        "csv_monitor": {"enabled": True, "output_path": "csv"},
    }
    made = planned("", ds)
    assert {name: made.deepspeed[name] for name in ds} == ds
    assert (made.config.log.tensorboard, made.config.log.wandb) == (False, None)


IN_BF16 = {"enabled": True}
BF16_STATES = {**IN_BF16, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


def trained(
    zygote: Zygote, folder: Path, data: list[str], ds: dict[str, Any]
) -> tuple[list[float], RunFolder]:
    """Return the losses of three steps with a JSON, and the run folder."""
    folder.mkdir()
    (folder / "ds.json").write_text(json.dumps(ds))
    words = [*SMALL_MODEL, *SHORT_RUN, "train.steps=3", "ds.bf16.enabled=true"]
    words += [*data, f"run.dir={folder / 'run'}"]
    ended = zygote.run(["--deepspeed", str(folder / "ds.json"), *words], folder / "logs")
    assert ended.codes == [0, 0], ended.output
    run = RunFolder(folder / "run")
    return [line["loss"] for line in run.read_metrics() if line.get("loss") is not None], run


@pytest.mark.gate("plan")
def test_autocast_of_bf16_changes_nothing(zygote: Zygote, data: list[str], tmp_path: Path) -> None:
    """DeepSpeed's own example of master weights in bf16 has both."""
    ds = {"bf16": BF16_STATES, "zero_optimization": {"stage": 3}}
    losses, _ = trained(zygote, tmp_path / "without", data, ds)
    autocast = {"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}}
    with_autocast, run = trained(zygote, tmp_path / "with", data, ds | autocast)
    plan = run.read_plan()
    assert plan["deepspeed"]["torch_autocast"]["enabled"]
    assert len(losses) == 3
    assert with_autocast == losses


@pytest.mark.gate("plan")
def test_stage_0_in_bf16_is_stage_1(zygote: Zygote, data: list[str], tmp_path: Path) -> None:
    ds = {"bf16": IN_BF16, "zero_optimization": {"stage": 0}}
    losses, run = trained(zygote, tmp_path / "zero", data, ds)
    (event,) = events(run, "changed")
    assert event["json_key"] == "zero_optimization.stage"
    ds = {"bf16": IN_BF16, "zero_optimization": {"stage": 1}}
    assert losses == trained(zygote, tmp_path / "one", data, ds)[0]


@pytest.mark.parametrize("mistake", ["a value that transformers refuses", "a pointer for weights"])
def test_late_json_problems(mistake: str, zygote: Zygote, data: list[str], tmp_path: Path) -> None:
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
