"""The answer of each exercise, by the functions that plan and train.

A function reads a student's draw and returns `truth`, in the unit of the exercise, with what else
its text and its mistakes use (exercises.toml); None if the draw makes no exercise. Studio pages and
numpy are imported where they are needed, because they take seconds.
"""

import shlex
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from harness.estimate.fit import with_stage
from harness.estimate.hardware import find_gpu
from harness.estimate.memory_item import GIB
from harness.estimate.step_time.job import DAY
from harness.estimate.timeline import Estimate
from harness.estimate.traffic import tensor
from harness.layout.grid import Coords, Grid
from harness.layout.recompute import flops_again
from harness.layout.shape import Shape, active_parameters, flops_per_token, parameters_by_kind
from harness.layout.stages import bubble
from harness.layout.world import World
from harness.plan.command import parse_command, plan_from
from harness.plan.duration import job_of, step_time
from harness.plan.model_config import find_model_config
from tools import estimate_memory, plan_cluster
from tools.cluster import ask, search
from tools.memory.sweep import read_sweep, sweep
from tools.memory.text import paper_bytes
from tools.plan_args import plan_of
from tools.sweeps import cost, spec

Values = dict[str, Any]
FIT, HOLD = ("fits",), ("fits", "tight")


class Draw(SimpleNamespace):
    """A student's numbers, and the commands and the file that they fill in."""

    def plan(self, number: int = 0, *more: str) -> Any:
        """Return the plan of a command, with more arguments."""
        _, program, *words = shlex.split(self.commands[number])
        if program in ("tools/estimate_memory.py", "tools/show_layout.py"):
            args = estimate_memory.make_parser().parse_intermixed_args([*words, *more])
            return plan_of(args, estimating=True)
        command = parse_command(words)
        return plan_from(command, world=command.elsewhere() or World())

    def swept(self) -> dict[int, Estimate]:
        """Return the estimates of a command whose last words are --sweep NAME=FROM..TO."""
        points = sweep(self.plan().estimate, read_sweep([self.commands[0].split()[-1]]))
        return {next(iter(point.values.values())): point.estimate for point in points}


def _states(draw: Draw) -> Values:
    parameters = draw.plan().estimate.inputs.parameters
    by_stage = [paper_bytes(parameters, stage, draw.gpus) / GIB for stage in range(4)]
    master = 4 * parameters / draw.gpus / GIB
    return {"truth": by_stage[draw.stage], "by_stage": by_stage, "master": master}


def _between_steps(draw: Draw) -> Values:
    rank = draw.plan().estimate.worst
    paper = paper_bytes(rank.run.parameters, draw.stage, draw.gpus) / GIB
    return {"truth": rank.total("between_steps") / GIB, "rank": rank, "paper": paper}


def _fewest_gpus(draw: Draw) -> Values | None:
    estimates = draw.swept()
    fits, holds = (_first(n for n, e in estimates.items() if e.verdict in v) for v in (FIT, HOLD))
    parameters, room = estimates[1].inputs.parameters, estimates[1].device_bytes or 0
    paper = (gpus for gpus in estimates if paper_bytes(parameters, 3, gpus) < room)
    return {"truth": fits, "holds": holds, "paper": _first(paper)} if fits > 1 else None


def _recomputed(draw: Draw) -> Values:
    before, after = (draw.plan(number).estimate.worst for number in (0, 1))
    parts = (rank.phase(before.peak_phase).items() for rank in (before, after))
    kept, keeps = (sum(size for name, size in p if "activations" in name) for p in parts)
    saved, activations = (before.peak - after.peak) / GIB, (kept - keeps) / GIB
    return {"truth": saved, "before": before, "after": after, "activations": activations}


def _traffic(draw: Draw) -> Values:
    from tools.studio_app.page import read_values
    from tools.studio_pages.zero import PAGE, inputs_of, traffic

    query = {"model": draw.model, "gpus": str(draw.gpus)}
    inputs, _ = inputs_of(read_values(PAGE.controls, query))

    def ratio(batches: int) -> float:
        each = (with_stage(replace(inputs, grad_accum=batches), n) for n in (draw.stage, 1))
        sent, sent_by_1 = (sum(traffic(inputs)) for inputs in each)
        return sent / sent_by_1

    return {"truth": ratio(draw.accumulation), "one": ratio(1)}


def _utilization(draw: Draw) -> Values:
    plan = draw.plan()
    step, shape = step_time(plan), plan.shape
    measured = float(f"{step.tokens_per_s_per_gpu * draw.percent / 100:.3g}")
    percent = 100 * measured / step.machine.peak_flops
    truth = percent * flops_per_token(shape, plan.seq_len)
    again = percent * sum(flops_again(shape, plan.seq_len, "full"))
    weights = percent * 6 * active_parameters(shape)
    return {"truth": truth, "again": again, "weights": weights, "step": step, "measured": measured}


def _accumulated(draw: Draw) -> Values | None:
    sizes = draw.swept()
    fits, holds = (max([n for n in sizes if sizes[n].verdict in v] or [0]) for v in (FIT, HOLD))
    ranks = sizes[1].inputs.grid.data
    if not fits or draw.batch < 2 * ranks * fits:
        return None
    return {"truth": draw.batch // ranks // fits, "fits": fits, "holds": holds, "ranks": ranks}


def _standing_still(draw: Draw) -> Values:
    import torch

    from tools.studio_pages.precision import rounded

    weights = 2.0 ** torch.arange(-24, 16)
    still = {n: rounded(weights + draw.lr, n) == weights for n in ("bf16", "fp16", "fp32")}
    first = {name: float(weights[where][0]) for name, where in still.items()}
    return {"truth": first[draw.format], **first}


def _days(draw: Draw) -> Values:
    plan = draw.plan()
    step = step_time(plan)
    return {"truth": job_of(plan, step).days, "mfu": step.mfu}


def _scaling(draw: Draw) -> Values:
    few, many = (step_time(draw.plan(number)).tokens_per_s_per_gpu for number in (0, 1))
    return {"truth": 100 * many / few}


def _micro_batches(draw: Draw) -> Values:
    share = draw.percent / 100 + 1e-12
    return {"truth": next(n for n in count(1) if bubble(draw.stages, n) <= share)}


def _rank(draw: Draw) -> Values:
    grid = Grid(draw.gpus, draw.stages, draw.tensor)
    truth = grid.rank(Coords(draw.stage, draw.data, 0, draw.place))
    return {"truth": truth, "data_ranks": grid.data}


def _exchanged(draw: Draw) -> Values:
    inputs = draw.plan().estimate.inputs
    calls, shape = tensor(inputs), inputs.shape
    truth = calls.total * draw.accumulation / GIB
    return {"truth": truth, "calls": calls.number, "shape": shape}


def _sequence_ranks(draw: Draw) -> Values | None:
    keys = ((n, f"ds.sequence_parallel_size={n}") for n in (1, 2, 4, 8))
    fits = _first(n for n, key in keys if draw.plan(0, key).estimate.verdict == "fits")
    return {"truth": fits} if fits > 1 else None


def _active(draw: Draw) -> Values:
    shape = draw.plan().shape
    counts = {"all": shape.parameters, "in_experts": parameters_by_kind(shape)["experts"]}
    counts["truth"] = active_parameters(shape)
    return {name: number / 1e9 for name, number in counts.items()}


def _on_disk(draw: Draw) -> Values:
    from harness.data.pair import bytes_per_id

    vocabulary = Shape.from_hf(find_model_config(draw.model)[0]).vocab_size
    width = bytes_per_id(vocabulary)
    return {"truth": draw.unique * 1e9 * width / GIB, "vocabulary": vocabulary, "width": width}


def _model_size(draw: Draw) -> Values:
    from tools.studio_pages.sizes import optimum

    peak = find_gpu(draw.gpu).peak_tflops("bf16")
    flops = draw.gpus * peak * 1e12 * draw.days * DAY * draw.mfu / 100
    parameters, tokens = optimum(flops)
    return {"truth": parameters / 1e9, "tokens": tokens / 1e9, "peak": peak}


def _rates(draw: Draw) -> Values:
    middle = draw.steps // 2
    cosine, wsd = (draw.plan(n).schedule(draw.steps) for n in (0, 1))
    high, low = wsd.lr(middle) / wsd.optim.lr, cosine.lr(middle) / wsd.optim.lr
    return {"truth": high / low, "middle": middle, "high": high, "low": low}


def _sweep_steps(draw: Draw) -> Values:
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "my.toml")
        path.write_text(draw.file, encoding="utf-8")
        trials = spec.read_sweep(path, problems)
        steps = [each.steps for each in cost.costs(trials, World(), problems)]
    assert not problems, problems
    sizes = {"most": max(steps), "trials": len(steps), "times": len(trials.seeds)}
    return {"truth": sum(steps), **sizes}


def _failures(draw: Draw) -> Values:
    args = plan_cluster.make_parser().parse_intermixed_args(shlex.split(draw.commands[0])[2:])
    question = ask.question_of(args)
    best = search.answer(args, question).best
    assert best is not None, draw.commands
    without = question.job(best).gpu_hours * draw.price
    return {"truth": question.cost(best) - without, "without": without}


TRUTHS: dict[str, Callable[[Draw], Values | None]] = {
    f"{afternoon}.{number}": truth
    for afternoon, truths in (
        (1, (_states, _between_steps, _fewest_gpus, _recomputed, _traffic)),
        (2, (_utilization, _accumulated, _standing_still, _days, _scaling)),
        (3, (_micro_batches, _rank, _exchanged, _sequence_ranks, _active)),
        (4, (_on_disk, _model_size, _rates, _sweep_steps, _failures)),
    )
    for number, truth in enumerate(truths, 1)
}


def _first(numbers: Iterable[int]) -> int:
    return next(iter(numbers), 0)
