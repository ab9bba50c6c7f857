"""Check that tensor parallelism keeps a family's loss and gradients: two ranks against one.

    python -m tests.gates.compare_divided
    python -m tests.gates.compare_divided --families cohere2 gemma3_text

For every causal language model family with a tensor-parallel plan, transformers builds a small
model with random weights. Two ranks divide it as a run does and compute the loss of one batch and
the gradient of every parameter; both must equal those of the whole model. Exit code 1 if a family
differs. Families that are refused, or whose small model cannot be built, are listed with the
reason.
"""

import argparse
import copy
import json
import math
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from harness.engine.fragments import assembled, cutter
from harness.engine.tensor import divide_forward
from harness.errors import ExitCode
from harness.launch.ranks import ending, forked
from harness.layout.families import FAMILIES, SIZE_KEYS, family_of
from harness.layout.grid import Grid, Share
from harness.layout.shape import Shape
from harness.layout.tensor import EXPERTS, TensorPlan, tensor_plan, whole_stream, without_sdpa
from harness.models.loss import PLAIN, LossSetup, forward
from harness.models.skeleton import hf_config
from harness.terminal import HelpFormatter
from tests.tables import beside
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

    def line(self) -> str:
        """Return a line with both differences and the verdict."""
        if self.problem:
            return f"{self.family:28} {self.problem}"
        name = self.family + " (experts)" * self.mixture
        amounts = f"loss {self.loss:.1e}  gradient {self.gradient:.1e} ({self.worst})"
        return f"{name:28} {amounts}  {self.verdict}"


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--families", nargs="+", metavar="MODEL_TYPE", help="only these")
    args = parser.parse_args()
    every = families()
    if unknown := sorted({*(args.families or ())} - {*every}):
        print(f"--families: no plan to divide {', '.join(unknown)}; there are {', '.join(every)}")
        return int(ExitCode.BAD_CONFIG)
    rows = []
    for family in args.families or every:
        rows.append(compared(family))
        print(rows[-1].line(), flush=True)
    differ = [row.family for row in rows if row.verdict == "DIFFERS"]
    done = [row for row in rows if not row.problem]
    mixtures = sum(row.mixture for row in done)
    print(f"{versions()}: {len(done) - mixtures} dense families and {mixtures} mixtures of experts")
    print(f"{len(done)} families compared, {len(differ)} differ")
    return 1 if differ else 0


def compared(family: str) -> Row:
    """Return the verdict of one family, on new ranks, so that none can hang the next one."""
    with tempfile.TemporaryDirectory() as folder:
        start = partial(forked, partial(_rank, family, folder=Path(folder)), RANKS)
        with ending(start) as group:
            group.wait(LIMIT_S)
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
        loss, gradients = _loss_and_gradients(model, PLAIN)
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
    shape = Shape.from_hf(config) if family in FAMILIES else None
    divides = not whole_stream(shape, SEQ_LEN, RANKS, 1, is_reversible=False)
    divided = divide_forward(model, plan, share, group, divides)
    divided.residuals.divide()
    divided_loss, own = _loss_and_gradients(model, LossSetup(divided.vocabulary))
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


def _loss_and_gradients(model: Any, setup: LossSetup) -> tuple[float, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB_SIZE, (2, SEQ_LEN + 1), generator=generator)
    loss, balancing = forward(model, ids[:, :-1], ids[:, 1:].contiguous(), setup=setup)
    mean = loss / ids[:, 1:].numel() + (0 if balancing is None else balancing)
    mean.backward()
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }
    return float(mean.detach()), gradients


SEQ_LEN = 24
_SMALL = beside(__file__, "compare_divided.toml")
VOCAB_SIZE: int = _SMALL["common"]["vocab_size"]


def families() -> list[str]:
    """Return the causal language model families with a plan, by transformers or by the harness."""
    types = {config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING}
    return sorted(name for name in types if family_of(name).tensor_plan or tensor_plan(name))


def tiny(family: str) -> tuple[dict[str, Any], PreTrainedModel]:
    """Return a small fp32 model, whose weights reveal a lost bias or norm, and its config.

    Raises transformers' error if these sizes do not fit the family.
    """
    default = CONFIG_MAPPING[family]()
    values: dict[str, Any] = {"model_type": family}
    for size, keys in SIZE_KEYS.items():
        values |= {key: _SMALL["sizes"][size] for key in keys if _has(default, key)}
    values |= {key: value for key, value in _SMALL["common"].items() if _has(default, key)}
    values |= {key: 0.0 for key in vars(default) if key.endswith(("dropout", "pdrop", "jitter"))}
    values |= _SMALL["latent"] if "kv_lora_rank" in values else {}
    values |= _SMALL["own"].get(family, {})
    config = hf_config(copy.deepcopy(values))
    torch.manual_seed(0)
    attention = "eager" if without_sdpa(family) else "sdpa"
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=attention
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.eval()  # disables dropout
    return {**config.to_dict(), **values}, model


def is_mixture(values: dict[str, Any], model: PreTrainedModel) -> bool:
    """Return True if the model has experts that its plan divides."""
    plan = TensorPlan.of(values)
    return any(plan.style_of(name) == EXPERTS for name, _ in model.named_modules())


def _has(config: PreTrainedConfig, key: str) -> bool:
    return key in vars(config) or key in getattr(config, "attribute_map", {})


if __name__ == "__main__":
    sys.exit(main())
