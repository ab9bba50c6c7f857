"""Check that tensor parallelism keeps a family's loss and gradients: two ranks against one.

    python -m tests.gates.compare_divided --out FOLDER --markdown FILE     # resumes
    python -m tests.gates.compare_divided --families cohere2 gemma3_text

For every causal language model family with a tensor-parallel plan, transformers builds a small
model with random weights. Two ranks divide it as a run does and compute the loss of one batch and
the gradient of every parameter; both must equal those of the whole model. Exit code 1 if a family
differs. Families that are refused, or whose small model cannot be built, are listed with the
reason.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing, nn

from harness.engine.fragments import assembled, cutter
from harness.engine.tensor import divide_forward
from harness.errors import ExitCode
from harness.layout.grid import Grid, Share
from harness.layout.tensor import TensorPlan
from harness.models.loss import forward
from harness.terminal import HelpFormatter
from tests.gates.matrix import same_versions
from tests.gates.planned import SEQ_LEN, VOCAB_SIZE, families, is_mixture, tiny
from tools.made_with import versions

RANKS = 2
LIMIT = 1e-4  # relative; another order of sums changes a hundredth of it
LIMIT_S = 300


@dataclass(frozen=True)
class Row:
    """The verdict on one family."""

    family: str
    loss: float = math.nan  # relative difference
    gradient: float = math.nan  # of the worst parameter, relative to its norm
    worst: str = ""
    """Name of the parameter with the worst gradient."""
    mixture: bool = False
    problem: str = ""
    """The reason why it was not compared."""

    @property
    def verdict(self) -> str:
        """The verdict: "equal", "DIFFERS", or the reason why it was not compared."""
        if self.problem:
            return self.problem
        return "equal" if max(self.loss, self.gradient) < LIMIT else "DIFFERS"


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--families", nargs="+", metavar="MODEL_TYPE", help="only these")
    parser.add_argument("--out", type=Path, help="keep each family's result here, to resume")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table here")
    args = parser.parse_args()
    every = families()
    if unknown := sorted({*(args.families or ())} - {*every}):
        print(f"--families: no plan to divide {', '.join(unknown)}; there are {', '.join(every)}")
        return int(ExitCode.BAD_CONFIG)
    rows = []
    for family in args.families or every:
        rows.append(_kept(family, args.out) if args.out else compared(family))
        print(f"{family:28} {_amounts(rows[-1])}  {rows[-1].verdict}", flush=True)
    if args.markdown:
        args.markdown.write_text(markdown(rows))
    differ = [row.family for row in rows if row.verdict == "DIFFERS"]
    done = [row for row in rows if not row.problem]
    print(f"{len(done)} families compared, {len(differ)} differ")
    return 1 if differ else 0


def _kept(family: str, out: Path) -> Row:
    """Return the kept verdict, or compute and keep a new one."""
    out.mkdir(parents=True, exist_ok=True)
    same_versions(out, "results")
    path = out / f"{family}.json"
    if path.exists():
        return Row(**json.loads(path.read_text()))
    row = compared(family)
    path.write_text(json.dumps(asdict(row)))
    return row


def compared(family: str) -> Row:
    """Return the verdict of one family. Its forked ranks are new, so that none can hang the next
    family.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        ranks = [
            context.Process(target=_rank, args=(family, rank, Path(folder)))
            for rank in range(RANKS)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(LIMIT_S)
        for rank in ranks:
            rank.kill()
        result = Path(folder) / "row.json"
        if not result.exists():
            return Row(family, problem="no result: the ranks hang or crash")
        return Row(**json.loads(result.read_text()))


def _rank(family: str, rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    try:
        row = _compare(family, rank, folder)
    except Exception as error:
        row = Row(family, problem=f"fails: {_in_a_line(error)}")
    if rank == 0:
        (folder / "row.json").write_text(json.dumps(asdict(row)))


def _compare(family: str, rank: int, folder: Path) -> Row:
    try:
        config, model = tiny(family)
        loss, gradients = _loss_and_gradients(model)
        model.zero_grad()
    except Exception as error:
        return Row(family, problem=f"no small model: {_in_a_line(error)}")
    try:
        plan = TensorPlan.of(config)
        share = Share(Grid(RANKS, tensor=RANKS), rank, {"tensor": plan.cut})
        if problems := plan.problems(RANKS):
            raise ValueError(problems[0])
        _cut(model, share)
    except ValueError as error:
        return Row(family, problem=f"refused: {error}")
    dist.init_process_group("gloo", f"file://{folder / 'ranks'}", rank=rank, world_size=RANKS)
    group = dist.group.WORLD
    assert group is not None
    divide_forward(model, plan, share, group)
    divided_loss, own = _loss_and_gradients(model)
    by_rank = [Share(share.grid, place, share.cutters) for place in range(RANKS)]
    shapes = {name: tuple(gradient.shape) for name, gradient in gradients.items()}
    whole = dict(
        assembled(
            own.items(),
            lambda name: [each.part(name, shapes[name]) for each in by_rank],
            group,
            torch.device("cpu"),
        )
    )
    everything = torch.stack([g.norm() for g in gradients.values()]).norm()
    apart = {
        name: float((whole[name] - g).norm() / (g.norm() + 1e-4 * everything))
        for name, g in gradients.items()
    }
    worst = max(apart, key=lambda name: math.inf if math.isnan(apart[name]) else apart[name])
    dist.barrier()
    dist.destroy_process_group()
    return Row(
        family,
        loss=abs(divided_loss / loss - 1),
        gradient=apart[worst],
        worst=worst,
        mixture=is_mixture(config, model),
    )


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:140]}"


def _cut(model: nn.Module, share: Share) -> None:
    """Replace every parameter by this rank's part; tied parameters stay one object."""
    cut, parts = cutter(share), dict[int, nn.Parameter]()
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        owner, _, attribute = name.rpartition(".")
        if id(parameter) not in parts:
            parts[id(parameter)] = cut(name, parameter.detach())
        model.get_submodule(owner)._parameters[attribute] = parts[id(parameter)]


def _loss_and_gradients(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB_SIZE, (2, SEQ_LEN + 1), generator=generator)
    loss, balancing = forward(model, ids[:, :-1], ids[:, 1:].contiguous())
    mean = loss / ids[:, 1:].numel() + (0 if balancing is None else balancing)
    mean.backward()
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }
    return float(mean.detach()), gradients


def markdown(rows: list[Row]) -> str:
    """Return the table for docs/."""
    done = [row for row in rows if not row.problem]
    dense = sum(not row.mixture for row in done)
    differ = sum(row.verdict == "DIFFERS" for row in done)
    lines = [
        "# Families whose tensors are divided",
        "",
        "Generated by `python -m tests.gates.compare_divided --markdown FILE`: small models of",
        "random weights, two ranks against one; how far the loss of a batch and the gradient of",
        "the worst parameter are apart, relative, in fp32. What is not compared has its reason.",
        f"{versions()}: {dense} dense families and {len(done) - dense} mixtures of",
        f"experts, {differ} differ.",
        "",
        "| family | loss | gradient | of | verdict |",
        "|---|---|---|---|---|",
    ]
    for row in [*done, *(row for row in rows if row.problem)]:
        name = row.family + (" (experts)" if row.mixture else "")
        amounts = ["", "", ""]
        if not row.problem:
            amounts = [f"{row.loss:.0e}", f"{row.gradient:.0e}", f"`{row.worst}`"]
        lines.append("| " + " | ".join([name, *amounts, row.verdict]) + " |")
    return "\n".join(lines) + "\n"


def _amounts(row: Row) -> str:
    return "" if row.problem else f"loss {row.loss:.1e}  gradient {row.gradient:.1e} ({row.worst})"


if __name__ == "__main__":
    sys.exit(main())
