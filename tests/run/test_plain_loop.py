"""A whole run against a plain PyTorch loop."""

import contextlib
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harness.checkpoint.compatibility import recorded_run
from harness.data.build import build_data
from harness.data.spec import DataSpec
from harness.launch.fork_server import Zygote
from harness.runfolder import RunFolder
from tests.gates import recipe
from tests.gates.cell import GLOBAL_BATCH
from tests.gates.models import LEARNED
from tests.gates.plain_model import Split, Way
from tests.gates.reference import Task, spreads, trained
from tests.gates.trajectory import Trajectory, difference
from tests.real_runs import SMALL_MODEL
from tests.run.features import in_gate, sentence, train, write_lines

STEPS, WARMUP_STEPS, LEAST = 12, 4, 0.25
HELD_OUT_SAMPLES = 5  # an evaluation's last batch is incomplete
RULE = (
    f'{{pattern="{recipe.GROUP_PATTERN}", lr_multiplier={recipe.GROUP_LR_MULTIPLIER}, '
    f"weight_decay={recipe.GROUP_WEIGHT_DECAY}}}"
)
WORDS = [
    *(f"train.steps={STEPS}", f"optim.warmup_steps={WARMUP_STEPS}", "optim.schedule=cosine"),
    *(f"optim.lr={recipe.LR}", f"optim.min_lr_ratio={LEAST}", f"optim.eps={recipe.EPS}"),
    *(f"optim.betas={list(recipe.BETAS)}", f"optim.weight_decay={recipe.WEIGHT_DECAY}"),
    *(f"optim.clip_norm={recipe.CLIP_NORM}", f"optim.groups=[{RULE}]", "model.dropout=0.0"),
    *("log.every=1", "eval.every=5", f"eval.samples={HELD_OUT_SAMPLES}", "data.held_out=0.1"),
    "data.document_mask=true",
]
TOLERANCE_FACTOR = 5.0  # the same as in the gate


def rate(step: int) -> float:
    """Return the rate of a step: a warm-up, then half a cosine down to LEAST at the last one."""
    number = step + 1
    if number < WARMUP_STEPS:
        return recipe.LR * number / WARMUP_STEPS
    share = 0.5 + 0.5 * math.cos(math.pi * (number - WARMUP_STEPS) / (STEPS - WARMUP_STEPS))
    return recipe.LR * (LEAST + (1 - LEAST) * share)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the arguments for prompts and completions, packed as whole documents."""
    folder, draw = tmp_path_factory.mktemp("pairs"), random.Random(0)
    pairs = [
        {"prompt": sentence(draw, 2, 14), "completion": f" {sentence(draw, 2, 14)}"}
        for _ in range(400)
    ]
    path = write_lines(folder / "pairs.jsonl", pairs)
    return [f"data.path={path}", f"data.cache_dir={folder / 'cache'}"]


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("zero1", "pairs"),
        *(in_gate(layout, "data") for layout in ("zero1", "zero3", "tensor2_zero1")),
        in_gate("pipeline2", "pairs"),
    ],
)
def test_run_equals_a_plain_training_loop(
    layout: str,
    kind: str,
    request: pytest.FixtureRequest,
    zygote: Zygote,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, data = RunFolder(tmp_path / "run"), request.getfixturevalue(kind)
    train(zygote, layout, run.path, *SMALL_MODEL, *data, *WORDS)
    plan = json.loads(run.plan_path.read_text())
    spec = DataSpec.of_run(recorded_run(plan["run"]), plan["model_config"])
    read = build_data(spec)
    assert read.train.holds_whole_documents == (kind == "pairs")
    batch, held_out = read.train.batch, read.held_out.batch(0, HELD_OUT_SAMPLES)
    task = Task(STEPS, lambda step: batch(step * GLOBAL_BATCH, GLOBAL_BATCH), rate, held_out)
    monkeypatch.setitem(LEARNED, "of the run", plan["model_config"])
    way = Way("of the run", "fp32")
    with one_thread():
        reference = trained(way, Split.even(GLOBAL_BATCH), False, task)
    lines = [line for line in run.read_metrics() if line["step"]]
    of_the_run = Trajectory(
        losses=[line["loss"] for line in lines],
        norms=[line["grad_norm"] for line in lines],
        held_out=lines[-1]["eval_loss"],
        gradients=reference.gradients,  # not recorded by runs
        sgd_changes=reference.sgd_changes,
    )
    assert [line["learning_rate"] for line in lines] == pytest.approx([*map(rate, range(STEPS))])
    assert reference.losses[-1] < 0.8 * reference.losses[0]
    distance = difference(of_the_run, reference)
    with one_thread():
        for spread in spreads(way, task):
            tolerance = spread.scaled(TOLERANCE_FACTOR)
            if not distance.exceeds(tolerance):
                break
    assert distance.exceeds(tolerance) == [], f"{distance}, where {tolerance} is allowed"


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread as a rank does: more threads would sum in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
