"""Decisions of a run without training: its data, its settings, its time limit and its end."""

import functools
import math
import shutil
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from harness import loop
from harness.checkpoint.collectives import broadcast_object
from harness.checkpoint.manifest import Checkpoint, TrainState
from harness.checkpoint.save import Saved, Saver
from harness.checkpoint.store import Retention, Store
from harness.config.batch import Curriculum
from harness.config.sections import EvalConfig, GuardConfig
from harness.data.batch import Batch
from harness.engine.groups import Groups, make_groups
from harness.errors import ConfigError, ExitCode, NoCheckpoint, RunStopped
from harness.guard import watchdog
from harness.guard.signals import StopGuard
from harness.guard.stability import Next, StabilityMonitor, Verdict
from harness.guard.time_left import TimeLeft
from harness.guard.watchdog import Pulse
from harness.layout.grid import Grid, Share
from harness.plan.command import parse_command, plan_from
from harness.run import build, ending, evaluation, saving
from harness.run.data_decisions import _require_same_data, _samples_of, require_same_settings
from harness.run.evaluation import summed
from harness.run.resumption import ResumePoint, choose_again, find_resume_point, own_checkpoints
from harness.run.run import Run
from harness.run.saving import finish_save
from harness.run.step import end_with_the_data, roll_back, take_step
from harness.runfolder import RunFolder
from harness.steps import Steps
from tests.checkpoint.small import PROBE, manifest
from tests.ranks import ranks
from tests.real_runs import run_ranks, train_command
from tests.tables import beside

TABLES = beside(__file__, "run.toml")


@pytest.mark.parametrize(
    ("step", "delay", "is_busy", "longest_s", "steps", "save_s"), TABLES["reserved"]
)
def test_time_limit_reserves_pending_steps_and_saves(
    step: int, delay: int, is_busy: bool, longest_s: float, steps: int, save_s: float
) -> None:
    asked: list[str] = []
    run: Any = mock.Mock(is_writer=True, is_over_budget=False, state=TrainState(step=step))
    run.pulse.longest_s = {"step": 20.0, "save": 3.0}.get
    run.plan.config.save.every, run.guard.delay, run.guard.request.ask = 8, delay, asked.append
    run.guard.agree = lambda *_: [*asked]
    run.saver = SimpleNamespace(written=False, is_busy=is_busy, longest_s=longest_s)
    run._most_before_the_end_s = lambda: Run._most_before_the_end_s(run)
    for more_s, answer in ((25, []), (15, ["the time limit"])):
        run.time_left = TimeLeft(20 * steps + save_s + more_s, save_bytes=2e9)
        assert Run.stop_asked(run) == answer


def test_foreground_save_timeout_equals_background_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training waits a second for the copies, and none for the files, which take 100 s."""
    now = [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    saved = Saved(Path("step-1"), step=1, stall_s=1.0, seconds=100.0, bytes=1, removed=[])
    pulse = Pulse(floor_s=5, factor=2, first_s=600)
    run: Any = mock.Mock(pulse=pulse, state=TrainState(step=1), is_writer=False)
    run.saver = SimpleNamespace(is_busy=True, finish=lambda: saved, longest_s=0.0)
    for _ in range(40):
        for phase, seconds in (("save", 1), ("step", 99)):
            pulse(phase, 1)
            now[0] += seconds
        finish_save(run)
    assert pulse.limit_s("save") == 200


@pytest.mark.parametrize(("length", "total"), TABLES["lengths"])
def test_a_run_that_skipped_samples_ends_with_its_mixture(length: int | None, total: int) -> None:
    said: list[str] = []
    run: Any = mock.Mock(state=TrainState(step=8, samples=64), steps=SimpleNamespace(total=20))
    run.data.train.length, run.plan.curriculum = length, Curriculum(8)
    run.event, run.progress.say = lambda kind, **fields: said.append(kind), said.append
    end_with_the_data(run)
    assert run.steps.total == total
    assert bool(said) == (total < 20)
    with nullcontext() if total == 20 else pytest.raises(ConfigError, match="reaches its epochs"):
        assert _samples_of(run.plan, run.data, 20) == 160


def test_rollbacks_to_one_checkpoint_are_limited(tmp_path, monkeypatch) -> None:
    """The checkpoint stores a count of 0, which must not reset that of the run. Without a
    checkpoint, none is possible.
    """
    monitor = StabilityMonitor(GuardConfig(max_rollbacks=2), EvalConfig())
    saved = replace(manifest(8, held_out_loss=2.5), watch=monitor.state())
    checkpoint = Checkpoint(tmp_path / "step-00000008", saved)
    run = mock.MagicMock(stability=monitor, state=TrainState(step=12, samples=96))
    run.plan.config.guard.max_rollbacks = 2
    run.steps.next_slice.samples = [96, 104]
    run.data.train.tokens_in.return_value = 7
    for name in ("finish_save", "load_into", "end_with_the_data"):
        monkeypatch.setattr(f"harness.run.step.{name}", mock.Mock())
    newest: list[Checkpoint | None] = [checkpoint]
    monkeypatch.setattr("harness.run.step.newest_usable", lambda folder: (newest[0], []))
    for _ in range(2):
        monitor.ask_to_go_back("a spike")
        roll_back(run, "a spike")
        run.steps.move.assert_called_with(TrainState(step=8, samples=104, tokens=519))
        assert run.held_out_nats == 2.5
        run.meter.restart.assert_called()
        assert monitor.verdict(8, False, "").next is Next.GO_ON
    for most, problem in ((2, "2 rollbacks did not help"), (3, "no checkpoint to roll back to")):
        newest[0], run.plan.config.guard.max_rollbacks = None, most
        with pytest.raises(RunStopped, match=problem) as stop:
            roll_back(run, "a spike")
        assert stop.value.code == ExitCode.DIVERGED


def test_a_held_out_loss_is_that_of_the_weights() -> None:
    run = mock.MagicMock(held_out_nats=2.5)
    take_step(run, mock.MagicMock(dropout_seed=0))
    assert run.held_out_nats is None


@pytest.mark.parametrize(("saved", "precision", "loss", "is_same"), TABLES["probes"])
def test_probe_loss_must_be_that_of_the_checkpoint(
    saved: str, precision: str, loss: float, is_same: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(saving, "loss_of", lambda engine, batch: loss)
    monkeypatch.setattr(saving, "stored_probe", mock.Mock())
    plan: Any = mock.Mock(precision=precision)
    plan.config.resume.allow = []
    checkpoint = Checkpoint(tmp_path / "step-00000008", replace(manifest(8), precision=saved))
    with nullcontext() if is_same else pytest.raises(NoCheckpoint, match="not the saved model"):
        saving.check_probe(mock.Mock(), checkpoint, plan)
    plan.config.resume.allow = ["probe"]
    saving.check_probe(mock.Mock(), checkpoint, plan)


def test_evaluations_count_each_sample_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eleven samples are six of twice the length. Rows beyond the sixth are masked out."""
    read: list[Batch] = []

    def noted(batches: list[Batch]) -> torch.Tensor:
        read.extend(batches)
        return torch.ones(2)

    def batch(first: int, rows: int) -> Batch:
        numbers = torch.arange(first, first + rows)[:, None]
        return Batch(numbers, numbers.clone(), None)

    plan: Any = mock.Mock(micro_batch=9, seq_len=4)  # at most four rows of 8
    plan.share.starts = lambda samples, rows: range(0, samples, rows)
    plan.config.eval.samples = 11
    stream: Any = mock.Mock(batch=batch, samples=10, at_once=10, seq_len=8)
    monkeypatch.setattr(evaluation, "summed", lambda run, batches, _: [noted(batches).tolist()])
    evaluation.mean_losses(mock.Mock(plan=plan), stream)
    engine: Any = mock.Mock(plan=plan, eval_batch=noted, sum_over_ranks=lambda sums: sums)
    saving.loss_of(engine, batch(0, 6))
    targets = [labels for each in read for labels in each.labels.flatten().tolist()]
    assert targets == [*range(6), *[-100] * 2, *range(6), *[-100] * 3]


def test_a_sample_that_cannot_be_kept_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_write", mock.Mock(side_effect=ConfigError("other data")))
    saving.keep_sample(run := mock.MagicMock())
    assert run.event.call_args.args == ("sample_not_kept",)


@pytest.mark.parametrize(
    ("verdict", "step", "is_saved"),
    [
        (Verdict(), 8, True),
        (Verdict(is_written=True), 9, False),
        (Verdict(Next.STOP, "", ExitCode.STOPPED), 9, True),
        (Verdict(Next.END_EARLY), 9, True),
        (Verdict(Next.STOP, "", ExitCode.DIVERGED), 8, False),
        (Verdict(Next.ROLL_BACK), 8, False),
    ],
)
def test_save_is_due_unless_the_weights_are_bad(
    verdict: Verdict, step: int, is_saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    did = mock.Mock()
    for name in ("save", "check_replicas", "keep_sample", "finish_save"):
        monkeypatch.setattr(saving, name, getattr(did, name))
    run: Any = mock.Mock(state=TrainState(step=step))
    run.plan.config.save.every = 4
    saving.save_if_due(run, verdict)
    assert did.save.mock_calls == [mock.call(run, background=verdict.next is Next.GO_ON)] * is_saved
    assert did.finish_save.called == verdict.is_written


@pytest.mark.parametrize(("kind", "total"), [("resumed", 14), ("branched", 14), ("weights", 20)])
def test_a_run_with_skipped_samples_keeps_its_mixture(kind: str, total: int, tmp_path) -> None:
    saved = replace(manifest(8, 2.5), state=TrainState(8, samples=96), watch={"patience": 1})
    checkpoint = Checkpoint(tmp_path / "run/checkpoints/step-00000008", saved)
    plan, data = mock.Mock(curriculum=Curriculum(8)), mock.Mock(train=mock.Mock(length=145))
    steps = Steps(plan, data.train, 20)
    run = mock.NonCallableMagicMock(plan=plan, data=data, steps=steps)
    type(run).state = Run.state
    loads = mock.patch.multiple(build, load_into=mock.DEFAULT, check_probe=mock.DEFAULT)
    with loads, mock.patch.object(ResumePoint, "text"):
        build._load(run, ResumePoint(checkpoint, kind))
    assert run.steps.total == total
    assert (run.held_out_nats == 2.5) == (kind != "weights")
    assert ("patience" in str(run.stability.restore.call_args)) == (kind == "resumed")


@ranks(2)
def test_checkpoint_published_before_the_lock_is_resumed(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    saver = Saver(Store(run.checkpoints_dir), dist.get_rank(), Retention(1))

    def publish(step: int) -> None:
        saver.start(manifest(step), [], PROBE, background=False)
        saver.finish()

    plan: Any = mock.Mock()
    plan.config.run.dir, plan.config.model.init_from = str(run.path), None
    plan.config.resume = SimpleNamespace(allow=(), from_=None)
    record = {"total_steps": 9}
    publish(4)
    before, chosen = own_checkpoints(plan), find_resume_point(plan, record)
    assert choose_again(plan, record, chosen, before) is chosen
    publish(6)
    again = choose_again(plan, record, chosen, before)
    assert again.checkpoint is not None
    assert again.checkpoint.path.name == "step-00000006"
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(run.checkpoints_dir)
    with pytest.raises(NoCheckpoint, match="were removed while the run was starting"):
        choose_again(plan, record, chosen, before)


@pytest.mark.slow("two nodes import DeepSpeed")
def test_a_problem_of_one_node_ends_the_others(tmp_path: Path) -> None:
    """A launcher ends the ranks of the node that failed; the others would wait for them."""
    for rank in range(2):
        (tmp_path / f"node-{rank}").mkdir()
    (tmp_path / "node-0" / "here.txt").write_text("words " * 5000)
    interpreter, *command = train_command("data.path=here.txt", f"run.dir={tmp_path / 'run'}")
    words = [interpreter, "-c", TABLES["on_its_node"], *command]
    ended = run_ranks(words, tmp_path, env={"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    assert ended.codes == [2, 2], ended.outputs
    problem = "data.path: here.txt does not exist"
    assert problem in ended.outputs[1]
    assert "rank 1 failed: on " in ended.outputs[0]
    assert problem in ended.outputs[0]
    assert not (tmp_path / "run").exists()


@ranks(2)
def test_no_rank_ends_before_rank_0_has_written_the_report(tmp_path: Path) -> None:
    """A launcher ends the other ranks soon after the first one has ended with code 75."""
    rank, page = dist.get_rank(), tmp_path / "report.html"

    def recorded(*args: object) -> None:
        if rank == 0:
            time.sleep(0.5)
            page.touch()

    run: Any = mock.Mock(guard=StopGuard(2), steps=SimpleNamespace(are_left=False))
    run.folder.path = "runs/a"
    run.folder.export_dir.exists = lambda: rank == 0  # rank 1 does not see it yet
    with mock.patch.multiple(ending, leave=mock.Mock(), alarm=mock.Mock(), _record=recorded):
        assert loop.train(run) == ExitCode.DONE
    assert page.exists()


@ranks(2)
def test_tensor_ranks_agree_on_held_out_loss_despite_rounding() -> None:
    rank = dist.get_rank()
    share = Share(Grid(2, tensor=2), rank)
    sums = torch.tensor([math.nextafter(2.5, 5 * rank), 4.0], dtype=torch.float64)
    run = mock.NonCallableMagicMock(plan=mock.Mock(grid=share.grid))
    run.engine.device = torch.device("cpu")
    run.engine.eval_batch = lambda batches, groups: len(batches) * sums
    run.stop_asked.return_value = (False, True, True)
    run.engine.group_of = Groups(share, make_groups(share, "loss")).of
    run.sum = functools.partial(Run.sum, run)
    (loss,) = summed(run, [mock.Mock()] * 10, 0) or []
    assert loss == pytest.approx((25.0, 40.0))
    assert broadcast_object(loss) == loss


@ranks(2)
def test_ranks_that_read_other_token_ids_are_refused_on_all() -> None:
    rank = dist.get_rank()

    def data_of(*sources: tuple[str, str | None]) -> Any:
        """Return data of sources with these fingerprints and dates; the last one is held out."""
        facts = [(SimpleNamespace(fingerprint=ids), day) for ids, day in sources]
        made = [SimpleNamespace(facts=of_ids, day=day) for of_ids, day in facts]
        return SimpleNamespace(sources=made[:-1], set_sources=(), old_source=made[-1])

    day = f"2026-01-3{rank}"
    _require_same_data(rank, data_of(("ids", None), ("more", day)))  # of the same ids
    with pytest.raises(ConfigError, match="rank 1 has other token ids than rank 0: documents or"):
        _require_same_data(rank, data_of(("ids", None), (f"more{rank}", "2026-01-31")))
    with pytest.raises(ConfigError) as caught:
        _require_same_data(rank, data_of(("ids", None), (f"more{rank}", day)))
    assert caught.value.problems == [
        "rank 1 has other token ids than rank 0: its chat template writes the date 2026-01-31, "
        "that of rank 0 2026-01-30: start again, or set data.date=2026-01-30"
    ]


@ranks(2)
def test_ranks_with_other_settings_are_rejected_on_all() -> None:
    rank = dist.get_rank()
    environ = {"DS_ACCELERATOR": "cpu", "RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}

    def plan(*words: str) -> Any:
        command = parse_command([f"run.dir=runs/{rank}", f"data.cache_dir=cache/{rank}", *words])
        return plan_from(command, environ)

    require_same_settings(plan("optim.lr=0.01"))
    for words in ([f"optim.lr=0.0{rank + 1}"], [f"ds.zero_optimization.stage={rank + 1}"]):
        key = words[0].partition("=")[0]
        with pytest.raises(ConfigError, match=f"rank 1 has other settings than rank 0: .*{key} is"):
            require_same_settings(plan(*words))


def test_losses_by_position_are_those_of_the_longer_set(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {"held out": (2.0, [2.5]), "longer": (9.0, [3.0, 1.0]), "stopped": (None, [None])}
    monkeypatch.setattr(evaluation, "mean_losses", lambda _, of, n=0: (of[0], of[1][:n]))

    def by_position(held_out: str, longer: str | None) -> object:
        data = SimpleNamespace(held_out=losses[held_out], long_held_out=longer and losses[longer])
        run = mock.Mock(data=data, plan=SimpleNamespace(seq_len=2))
        run.engine.setup.preferences = None
        return evaluation.evaluate_by_position(run)

    assert by_position("held out", "longer") == (2.0, [3.0, 1.0])
    assert by_position("held out", None) == (2.0, [2.5])
    assert by_position("stopped", "longer") == (None, [])
