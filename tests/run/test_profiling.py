"""Profiling a few steps in real runs on two ranks."""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from harness.config.run_file import load_run_config
from harness.data.batch import Batch
from harness.errors import ConfigError
from harness.launch.fork_server import Zygote
from harness.launch.ranks import Outcome
from harness.layout.shape import flops_per_unit
from harness.layout.world import World
from harness.models.skeleton import hf_config, skeleton
from harness.plan.make import make_plan
from harness.run.profiling import Profiler, flop_counter, flop_table
from harness.runfolder import RunFolder
from harness.steps import Step
from tests.real_runs import REPOSITORY, SHORT_RUN, SMALL_MODEL, events
from tests.run.features import in_gate

STEPS = 8
WINDOW = "profile.steps=3:6"
Train = Callable[..., tuple[Outcome, RunFolder]]


@pytest.fixture(scope="module")
def train(zygote: Zygote, data: list[str]) -> Train:
    """Return a function that trains until the ranks end with codes; None: with any."""

    def run(path: Path, *more: str, fault: Any = None, codes: Any = (0, 0)) -> Any:
        json_name = next((word for word in more if not re.search("[.=]", word)), "zero3")
        words = [
            f"--deepspeed={REPOSITORY / 'ds_configs' / json_name}.json",
            *(*SMALL_MODEL, *SHORT_RUN, *data, f"run.dir={path}", f"train.steps={STEPS}"),
            *("model.dropout=0.1", "eval.every=4", "save.every=4"),
            *(word for word in more if word != json_name),
        ]
        if any(word.startswith("train.epochs") for word in more):
            words = [word for word in words if not word.startswith("train.steps")]
        ended = zygote.run(words, path.with_suffix(".logs"), fault)
        assert codes is None or ended.codes == [*codes], ended.output
        return ended, RunFolder(path)

    return run


def learned(run: RunFolder) -> list[tuple[Any, ...]]:
    return [
        (line["step"], line.get("loss"), line.get("grad_norm"), line.get("eval_loss"))
        for line in run.read_metrics()
    ]


def traced_steps(path: Path) -> set[int]:
    """Return the steps marked in a Chrome trace."""
    with gzip.open(path) as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    return {int(name.removeprefix("step ")) for name in names if re.fullmatch(r"step \d+", name)}


def written(run: RunFolder) -> list[str]:
    return sorted(path.name for path in run.profile_dir.iterdir())


# --- what is asked for ---


@pytest.mark.parametrize("text", ["10", "3:3", "5:3", "0:3", "a:b", "3:", "3-5", "1:2:3"])
def test_invalid_profile_window_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match=r"profile\.steps is .* A:B, 1 <= A < B"):
        load_run_config(None, [f'profile.steps="{text}"'])


@pytest.mark.parametrize(("steps", "refused"), [("9:11", True), ("9:10", False), ("1:2", False)])
def test_profile_window_past_the_run_is_rejected(steps: str, refused: bool) -> None:
    run = load_run_config(None, ["train.steps=10", f"profile.steps={steps}"])
    if not refused:
        assert make_plan(run, {}, World()).config.profile.window
        return
    with pytest.raises(ConfigError, match=r"the run ends with step 10.*set train.steps to 11"):
        make_plan(run, {}, World())


@pytest.mark.gate("runs")
def test_profile_window_past_the_epoch_is_rejected_when_known(train: Train, tmp_path: Path) -> None:
    window = ("train.epochs=0.01", "profile.steps=998:999")
    ended, run = train(tmp_path / "run", *window, codes=(2, 2))
    assert "profile.steps is '998:999', but the run ends with step" in ended.output
    assert not run.path.exists()


# --- what is written ---

COLLECTIVES = {"zero1": "all_reduce", "zero3": "reduce_scatter", "pipeline2": "send"}


@pytest.mark.parametrize("layout", [*map(in_gate, ("zero3", "zero1", "pipeline2"))])
def test_profile_shows_its_window_and_changes_nothing(layout: str, train: Train, tmp_path) -> None:
    ended, run = train(tmp_path / "profiled", layout, WINDOW)
    _, plain = train(tmp_path / "plain", layout)
    assert learned(run) == learned(plain)
    assert not plain.profile_dir.exists()
    assert written(run) == ["flops-6.txt", "trace-3-5.json.gz"]
    trace = run.profile_dir / "trace-3-5.json.gz"
    assert traced_steps(trace) == {3, 4, 5}
    # The ten most expensive operations, in order.
    rows = re.findall(r"^ +([\d.]+) ms +([\d.]+)% +([\d.]+) x (\S+)", ended.output, re.M)
    times = [float(time) for time, *_ in rows]
    assert len(times) == 10
    assert times == sorted(times, reverse=True)
    assert times[0] > 0
    assert any(name.startswith("aten::") for *_, name in rows)
    # Torch counts the FLOPs on which mfu is based: with ZeRO 3 those of the unsharded model, in a
    # pipeline those of the first stage.
    assert float(*re.findall(r"FLOPs counted by torch, ([\d.]+) of", ended.output)) == 1.0
    text = (run.profile_dir / "flops-6.txt").read_text()
    assert re.search(r"^ +[\d,]+ +[\d.]+% aten\.mm$", text, re.M), text
    assert re.search(r"^ +[\d,]+ +[\d.]+% \S+\.layers\.0$", text, re.M), text
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    named = [event for event in events if COLLECTIVES[layout] in event["name"]]
    lasting = [event["dur"] for event in named if "dur" in event]
    assert lasting, {event["name"] for event in events}
    assert min(lasting) > 0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_each_product_of_a_forward_pass_is_counted_once(attention: str) -> None:
    overrides = [f"model.overrides.{key}" for key in ("num_hidden_layers=2", "vocab_size=64")]
    plan = make_plan(load_run_config(None, [*SMALL_MODEL, *overrides]), {}, World())
    assert plan.shape is not None
    model = skeleton(hf_config(plan.model_config), torch.float32, attention)
    model.to_empty(device="cpu")
    with flop_counter() as counter, torch.no_grad():
        model(input_ids=torch.zeros(2, 32, dtype=torch.int64), use_cache=False)
    expected = 2 * 32 * sum(flops_per_unit(plan.shape, 32)) // 3
    assert counter.get_total_flops() == expected
    assert flop_table(counter, "a pass").startswith(f"a pass: {expected:,} FLOPs\n")


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_take_the_counted_pass_and_one_writes(rank: int, tmp_path: Path) -> None:
    plan = make_plan(load_run_config(None, ["train.steps=10", WINDOW]), {}, World(rank=rank))
    batch, taken, said = Batch(torch.zeros(1, 1), torch.zeros(1, 1), None), [], []

    def eval_batch(batches: list[Batch]) -> None:
        taken.extend(batches)
        torch.ones(2, 3) @ torch.ones(3, 4)

    engine: Any = SimpleNamespace(eval_batch=eval_batch)
    profiler = Profiler(plan, engine, tmp_path / "profile", said.append)
    run = mock.Mock()
    profiler.begin(run)
    for number in range(1, 9):
        profiler.after(cast(Step, SimpleNamespace(number=number, batches=[batch])), None)
    assert run.meter.restart.call_count == 2  # what takes time is not the step's
    assert taken == [batch]
    assert ["pass of a micro-batch: 48 FLOPs" in text for text in said] == [True] * (rank == 0)


# --- where a window is broken off ---


@pytest.mark.gate("runs")
def test_profile_window_interrupted_by_a_stop_is_completed(train: Train, tmp_path: Path) -> None:
    stop = {"rank": 1, "at": "in a step", "nth": 3, "do": "term"}
    _, run = train(tmp_path / "run", WINDOW, fault=stop, codes=(75, 75))
    at = (run.read_status() or {})["step"]
    assert 3 <= at < 5  # within the window, so that both attempts have a part
    assert written(run) == [f"trace-3-{at}.json.gz"]
    train(tmp_path / "run", WINDOW)
    assert f"trace-{at + 1}-5.json.gz" in written(run)
    assert "flops-6.txt" in written(run)


@pytest.mark.gate("runs")
def test_profile_window_is_repeated_after_a_kill_within_it(train: Train, tmp_path: Path) -> None:
    kill = {"rank": 0, "at": "in a step", "nth": 6, "do": "kill"}
    ended, run = train(tmp_path / "run", WINDOW, fault=kill, codes=None)
    assert ended.codes[0] == -9, ended.output
    train(tmp_path / "run", WINDOW)  # from step 4 on
    assert "trace-5-5.json.gz" in written(run)
    before = {path: path.stat().st_mtime_ns for path in run.profile_dir.iterdir()}
    train(tmp_path / "run", WINDOW, "train.steps=10")
    assert {path: path.stat().st_mtime_ns for path in run.profile_dir.iterdir()} == before


@pytest.mark.gate("runs")
@pytest.mark.parametrize("layout", ["zero2", "pipeline2"])
def test_a_rollback_in_the_window_traces_it_again(train: Train, tmp_path, layout: str) -> None:
    spoils = {"loss": {str(8 * 9): 1e4}}  # the loss of step 10
    watched = ("guard.spike_window=16", "guard.spike_sigma=12", "guard.spikes=rollback")
    more = (layout, *watched, "train.steps=14", "profile.steps=9:12")
    _, run = train(tmp_path / "run", *more, fault={"spoil": spoils})
    (event,) = events(run, "rollback")
    assert (event["from_step"], event["to_step"]) == (10, 8)
    assert written(run) == ["flops-12.txt", "trace-9-11.json.gz"]
    assert traced_steps(run.profile_dir / "trace-9-11.json.gz") == {9, 10, 11}
