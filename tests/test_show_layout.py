"""show_layout.py: the plan's layout as text, without torch."""

import itertools
import json
import re
from pathlib import Path

import pytest

from harness.layout.grid import Grid
from harness.layout.stages import bubble, in_flight, schedule
from tests.run_tools import run_tool
from tests.tables import beside
from tests.tiers import rest_in_gate
from tools.layout.schedules import SCHEDULES, moments, most_kept, spans, waiting

GPT2 = ("--model", "gpt2-124m", "--seq-len", "1024", "--gpus", "8")


def run(*arguments: str, code: int = 0) -> str:
    done = run_tool("show_layout", *arguments, code=code)
    return done.stderr if code else done.stdout


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 1), (4, 4), (4, 9), (8, 3)])
def test_stages_equally_fast_wait_for_the_bubble(stages: int, micro_batches: int) -> None:
    step = spans(schedule(stages, micro_batches), [(1, 2)] * stages)
    assert waiting(step) == pytest.approx(bubble(stages, micro_batches))


def test_a_step_of_uneven_stages_by_hand() -> None:
    step = spans(schedule(2, 2), [(1, 2), (2, 4)])
    by_stage = {
        stage: [(s.kind[0], s.micro_batch, s.begin, s.end) for s in step if s.stage == stage]
        for stage in range(2)
    }
    assert by_stage[0] == [("f", 0, 0, 1), ("f", 1, 1, 2), ("b", 0, 7, 9), ("b", 1, 13, 15)]
    assert by_stage[1] == [("f", 0, 1, 3), ("b", 0, 3, 7), ("f", 1, 7, 9), ("b", 1, 9, 13)]
    assert waiting(step) == pytest.approx(1 - (6 + 12) / (2 * 15))


# (p - 1) x these, in units of a micro-batch's time on a stage: 1 forward and 2 backward.
BUBBLES = {
    "1F1B": lambda chunks: 3.0,  # arXiv 2006.09503, as GPipe's, arXiv 1811.06965, section 2.3
    "GPipe": lambda chunks: 3.0,
    "interleaved 1F1B": lambda chunks: 3 / chunks,  # arXiv 2104.04473, section 2.2
    "zero-bubble (ZB-H1)": lambda chunks: 1.0,  # F + B - W, arXiv 2401.10241, table 1
}


@pytest.mark.parametrize(("stages", "batches"), [(4, 4), (2, 6), (8, 16), (3, 3)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_wait_and_keep_what_papers_say(name: str, stages: int, batches: int) -> None:
    for chunks in (2, 3, 4) if name.startswith("inter") else (1,):
        rows = SCHEDULES[name](stages, batches, chunks)
        placed = spans(rows, [(1, 2)] * stages, chunks)
        idle = max(span.end for span in placed) - 3 * batches
        assert idle == pytest.approx((stages - 1) * BUBBLES[name](chunks))
        assert waiting(placed) == pytest.approx(idle / (idle + 3 * batches))
        kept = [most_kept(row, chunks) for row in rows]
        most = {"GPipe": batches, "interleaved 1F1B": stages + (stages - 1) / chunks}
        assert max(kept) == pytest.approx(min(batches, most.get(name, stages)))
        if name == "1F1B":
            assert kept == [in_flight(stages, stage, batches) for stage in range(stages)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_uses_nothing_before_it_is_there(name: str) -> None:
    """Every task runs once, one at a time per stage, and after its inputs."""
    stages, batches, work = 4, 8, [(3, 5), (1, 2), (4, 9), (2, 2)]
    chunks = 2 if name.startswith("inter") else 1
    placed = spans(SCHEDULES[name](stages, batches, chunks), work, chunks)
    ends = {(s.kind, s.chunk * stages + s.stage, s.micro_batch): s.end for s in placed}
    kinds = 3 if name.startswith("zero") else 2
    assert len(ends) == len(placed) == kinds * stages * chunks * batches
    for stage in range(stages):
        own = sorted((s.begin, s.end) for s in placed if s.stage == stage)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(own))
    for span in placed:
        place, batch = span.chunk * stages + span.stage, span.micro_batch
        if span.kind == "forward":
            assert place == 0 or ends["forward", place - 1, batch] <= span.begin
        elif span.kind == "weights":
            assert ends["inputs", place, batch] <= span.begin
        else:
            assert ends["forward", place, batch] <= span.begin
            assert ends.get((span.kind, place + 1, batch), 0) <= span.begin


def test_a_step_of_3d_parallelism_is_the_pipelines_schedule() -> None:
    """Each pass happens once on each stage, after its input was sent; then the rest."""
    grid = Grid(32, pipeline=4, tensor=4)
    turns = [*moments(grid, micro_batches=3, zero_stage=1)]
    kinds = [turn.kind for turn in turns]
    assert kinds[-3:] == ["gradients", "optimizer", "weights"]
    assert kinds.count("passes") == kinds.count("sums") == 2 * (3 + 4 - 1)
    done, sent = set(), {(0, "forward", batch) for batch in range(3)}
    for turn in turns:
        for stage, task in enumerate(turn.work):
            if task is not None and turn.kind == "passes":
                last = stage == grid.pipeline - 1 and task[0] == "backward"
                assert last or (stage, *task) in sent
                assert (stage, *task) not in done
                done.add((stage, *task))
        for stage, to in turn.sends:
            task = turn.work[stage]
            assert task is not None
            sent.add((to, *task))
    assert len(done) == 4 * 2 * 3
    alone = [turn.kind for turn in moments(Grid(4, pipeline=4), 1, zero_stage=0)]
    assert {*alone} == {"passes", "sends", "optimizer"}


@pytest.mark.gate("tools")
def test_nothing_said_of_the_batch_fills_the_pipeline() -> None:
    assert "A step: 16 micro-batches of 1 x 1024 tokens" in run(*GPT2, "ds.pipeline.stages=4")
    assert "A step: each data rank runs 1 micro-batch of 1 x 1024" in run(*GPT2)


RANKS = beside(__file__, "show_layout.toml")


@pytest.mark.parametrize("words", rest_in_gate("tools", RANKS, 2))
def test_every_rank_has_its_place_and_share(words: str) -> None:
    text = run("--model", "llama-3-8b", "--deepspeed", *f"ds_configs/{words}".split())
    for pattern in RANKS[words]:
        assert re.search(pattern, text), pattern


@pytest.mark.gate("tools")
def test_an_unknown_architecture_has_a_layout_too(tmp_path: Path) -> None:
    config = {"model_type": "brand_new", "hidden_size": 8, "num_hidden_layers": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = run("--model", str(tmp_path), "--gpus", "4", "ds.pipeline.stages=2")
    assert "embedding, layers 0-2" in text
    assert "note: decoder layers are split evenly" in text


@pytest.mark.parametrize(
    ("model", "verdict"), [("gpt2-124m", "it fits"), ("llama-3-70b", "it does not fit")]
)
def test_a_known_gpu_has_a_verdict(model: str, verdict: str) -> None:
    text = run("--model", model, "--gpus", "8", "--gpu", "a100-80")
    assert f"On GPUs of 80 GiB {verdict}" in text
    assert re.search(r"^Time: .* s per step \(", text, re.MULTILINE)
    assert "On GPUs of" not in run("--model", model, "--gpus", "8")
