"""A run's terminal lines and messages, its metrics, and its sampled text."""

import io
import itertools
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from harness.config.batch import Slice
from harness.config.run_config import RunConfig
from harness.estimate.fit import changes_that_help
from harness.layout.world import World
from harness.plan.make import make_plan, takes
from harness.run import live_memory
from harness.run.data_decisions import _vocabulary
from harness.run.finish import _as_block, _clock, continued, question_of
from harness.run.live_memory import Compared, MemoryCheck, is_out_of_memory, live_storages
from harness.run.meter import Meter, expert_load, monitor_events
from harness.run.progress import Progress
from harness.run.reporting import explain_out_of_memory
from tests.ranks import ranks
from tests.real_runs import REPOSITORY
from tests.tables import beside

TABLES = beside(__file__, "meter.toml")
LINE: dict[str, Any] = TABLES["line"]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, *lines: dict[str, Any]) -> str:
    progress = Progress(enabled=True, stream=stream)
    progress.total_steps = 100
    for line in lines:
        progress.step(line)
    return stream.getvalue()


def test_step_line_is_plain_or_updates_on_a_terminal() -> None:
    later = {**LINE, "step": 6}
    plain, live = shown(io.StringIO(), LINE, later), shown(_Terminal(), LINE, later)
    assert (plain.count("\n"), plain.count("\r")) == (2, 0)
    assert (live.count("\n"), live.count("\r")) == (0, 2)
    assert shown(_Terminal(), {**LINE, "eval_loss": 2.25}).endswith("\n")  # an evaluation stays
    longer, shorter = shown(_Terminal(), {**LINE, "mfu": 0.4}, LINE).split("\r")[1:]
    assert len(shorter) >= len(longer)  # covers what was there


@pytest.mark.parametrize(("line", "parts", "others"), TABLES["lines"])
def test_a_line_tells_what_is_known(line: dict[str, Any], parts: Any, others: str) -> None:
    text = shown(io.StringIO(), {**LINE, **line})
    assert [part for part in parts if part not in text] == []
    assert [word for word in others.split() if word in text] == []


def test_only_rank_0_logs() -> None:
    stream = io.StringIO()
    Progress(enabled=False, stream=stream).say("text")
    assert stream.getvalue() == ""


def test_monitors_get_what_is_known_by_samples() -> None:
    events = monitor_events({**LINE, **TABLES["more"]})
    assert {*map(tuple, TABLES["monitored"])} <= {*events}
    assert "train/mfu" not in [name for name, _, _ in events]


def test_a_console_that_is_gone_does_not_end_a_run() -> None:
    """Not a closed terminal, a log on a full disk, or the rest in its buffer."""
    code = "from harness.run.progress import Progress\nprogress = Progress(True)\n"
    code += "for _ in range(3):\n    progress.say('x' * 10_000)\n"
    with Path("/dev/full").open("w") as full:
        subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, stdout=full, check=True)


# --- the load of experts ---


@pytest.mark.parametrize(("tokens", "largest", "entropy"), TABLES["experts"])
def test_expert_load_is_logged(tokens: list[list[int]], largest: float, entropy: float) -> None:
    load = {name: float(value) for name, value in expert_load(torch.tensor(tokens)).items()}
    assert load == pytest.approx({"expert_load_max": largest, "expert_load_entropy": entropy})
    assert expert_load(None) == {}


# --- live memory ---


def test_live_storages_count_tensors_and_gradients_once() -> None:
    before = live_storages()
    tensor, sparse = torch.zeros(1000), torch.eye(3).to_sparse()
    view, empty = tensor[10:], torch.empty(10**9, device="meta")
    weight = torch.zeros(10, requires_grad=True)
    weight.sum().backward()
    new = [storage for key, (storage, _) in live_storages().items() if key not in before]
    assert sorted(storage.nbytes() for storage in new) == [40, 40, 4000]
    del view, empty, sparse


def test_running_out_of_memory_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)
    for text, is_lack in TABLES["messages"]:
        assert is_out_of_memory(RuntimeError(text)) == is_lack
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))


def test_estimate_error_above_10_percent_is_marked() -> None:
    assert ["(!)" in str(Compared("peak", 100, n)) for n in (100, 91, 90)] == [False, False, True]
    assert str(Compared("built", 99_999, 100_000)) == "built 0.000 GiB, predicted +0.0%"


def test_without_an_estimate_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(make_plan(RunConfig(), {}, World()), estimate=None)
    monkeypatch.setattr(live_memory, "live_storages", lambda: pytest.fail("walked the heap"))
    check = MemoryCheck(plan, torch.device("cpu"))
    for _ in range(4):
        check.step(mock.Mock(), mock.Mock())
    assert check.compared == []


def test_mfu_is_unknown_without_gpu_flops_or_an_own_gpu() -> None:
    plan = make_plan(RunConfig(), {}, World(gpu="NVIDIA H100 80GB HBM3"))
    worlds = World(gpu="another"), replace(plan.world, ranks_per_gpu=2)
    others = [replace(plan, shape=None), *(replace(plan, world=world) for world in worlds)]
    lines = [Meter(each).line(torch.zeros(()), 0.0, 0, {}) for each in (plan, *others)]
    assert [line["mfu"] for line in lines] == [0.0, None, None, None]


def test_out_of_memory_advice_fits_a_share_of_the_gpu(tmp_path, monkeypatch) -> None:
    world = World(0, 4, 0, 4, accelerator="cuda", gpu="h100-80", ranks_per_gpu=4)
    config = RunConfig.model_validate({"model": {"name": "llama-1b"}})
    plan = make_plan(config, {"zero_optimization": {"stage": 1}}, world)
    failures: list[str] = []
    run: Any = mock.Mock(plan=plan, state=SimpleNamespace(step=1))
    run.engine.device = torch.device("cuda")
    run.folder.append_failure = lambda *_, message, **__: failures.append(message)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 79 << 30))
    monkeypatch.setattr(torch.cuda, "memory_summary", lambda *_, **__: "")
    explain_out_of_memory(run)
    assert plan.estimate is not None
    expected = changes_that_help(plan.estimate, (79 << 30) // 4, takes(plan))
    assert failures[0].endswith(f"; {expected}")
    assert expected != changes_that_help(plan.estimate, 79 << 30, takes(plan))


def test_rates_cover_all_steps_and_gpus_since_the_last_line(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr("harness.run.meter.time.perf_counter", lambda: now[0])
    plan = make_plan(RunConfig(), {}, World(gpu="NVIDIA H100 80GB HBM3"))
    step: Any = SimpleNamespace(tokens=96, positions=128, waited_s=0.25, reads=Slice(0, 8, 2))
    lines = []
    for count in (1, 2):
        meter: Any = Meter(replace(plan, world=replace(plan.world, world_size=count)))
        now[0] += 60.0
        meter.restart()  # after an evaluation
        for _ in range(4):
            meter.step_done(step)
        now[0] += 2.0
        lines.append(meter.line(torch.ones(()), 1.0, 9, {}))
    rates = {"step_time_s": 0.5, "tokens_per_s": 192.0, "data_wait_share": 0.5}
    assert all(rates.items() <= line.items() for line in lines)
    assert lines[0]["mfu"] == pytest.approx(2 * lines[1]["mfu"])
    flops = 4 * 96 * meter._flops_per_token(plan.shape, 6)  # each sample is two sequences
    assert lines[1]["mfu"] == pytest.approx(flops / 2.0 / meter._peak_flops)


# --- a sample of text ---


def test_prompts_begin_as_documents_and_samples_are_printable() -> None:
    run: Any = mock.Mock()
    run.plan.config.sample.prompt, run.data.begin = "why", [1]
    run.data.tokenizer.return_value = {"input_ids": [5, 6]}
    assert question_of(run) == [1, 5, 6]
    assert _as_block("a\x1b[2Jb\nc") == "  | a\\x1b[2Jb\n  | c"


def _counting(ids: torch.Tensor) -> torch.Tensor:
    """Return logits with one possible id below 10: after 3 comes 4, but after five ids none."""
    logits = torch.full((12,), -math.inf)
    logits[int(ids[0, -1]) + (ids.shape[1] < 5)] = 0.0
    return logits.where(logits == 0.0, torch.tensor([-1e9] * 10 + [9.0] * 2))


def _text(stops: set[int], tokens: int = 8, up_after: int = 99) -> list[int]:
    asked = itertools.count(1)
    return continued(_counting, [1], 10, stops, tokens, 4, 0, lambda: next(asked) >= up_after)


def test_sample_ends_at_length_stop_time_or_nonfinite_logits() -> None:
    assert _text(set()) == [2, 3, 4, 5, 6, 7, 8, 9]
    assert _text(set(), tokens=2) == [2, 3]
    assert _text({5}) == [2, 3, 4]
    assert _text(set(), up_after=3) == [2, 3, 4]
    nothing = torch.full((12,), math.nan)
    assert continued(lambda _: nothing, [1], 10, set(), 8, 4, 0, lambda: False) == []


@ranks(2)
def test_rank_0_ends_a_sample_whose_time_is_up() -> None:
    for limits_s, ends in (((0.0, 600.0), True), ((600.0, 0.0), False)):
        assert _clock(limits_s[dist.get_rank()])() == ends


# --- messages about the vocabulary ---


def unused_rows(
    source: str | None, tokenizer: str | None, used: int = 8192, run_dir: Path | None = None
) -> list[dict[str, Any]]:
    plan: Any = mock.Mock(model_config={"vocab_size": 50_257}, grid=SimpleNamespace(tensor=6))
    plan.config.model.init_from, plan.config.data.tokenizer = source, tokenizer
    plan.config.run.dir = run_dir
    return _vocabulary(plan, mock.Mock(vocab_size=used))


@pytest.mark.parametrize("source", ["export", "run", "owner/model", "bare"])
def test_unused_rows_name_the_tokenizer_that_fits(tmp_path: Path, source: str) -> None:
    own = source if source == "owner/model" else str(tmp_path / source)
    fits = f"{own}/tokenizer" if source == "run" else own  # as in its run folder
    if source != "owner/model":
        Path(fits).mkdir(parents=True)
    if source in ("export", "run"):
        Path(fits, "tokenizer.json").write_text("{}")
    (event,) = unused_rows(own, "other")
    message = event["message"]
    assert event["kind"] == "unused_rows"
    assert message.startswith("only 8,192 of 50,257 vocabulary rows are used: data.tokenizer is ")
    advice = f"set data.tokenizer={fits}, or leave the key out"
    if source == "bare":
        advice = f"{own}, where the weights are from, has none: set data.tokenizer to"
    assert advice in message
    assert "has no larger tokenizer: the rest is unused" in unused_rows(own, None)[0]["message"]
    assert unused_rows(own, "other", used=50_000) == []


def test_unused_rows_of_random_weights_can_be_left_out(tmp_path: Path) -> None:
    (event,) = unused_rows(None, "other", 8192, tmp_path)
    assert event["message"].endswith("rows are used: set model.overrides.vocab_size=8196")
    (tmp_path / "plan.json").touch()
    assert unused_rows(None, "other", 8192, tmp_path) == []
