"""A folder that DeepSpeed's `save_checkpoint` wrote, as fragments: ZeRO 1, 2 and 3, any ranks."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.checkpoint.files import Unusable
from harness.checkpoint.fragment import BUFFER, WEIGHT, Fragment
from tools.importing.pickles import read

_OPTIM = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


@dataclass(frozen=True)
class Rank:
    """What one data rank saved. `states`: of its optimizer, one per flat tensor of `flats`."""

    number: int
    optimizer: dict[str, Any]
    flats: list[torch.Tensor]
    states: list[dict[str, Any]]

    def tensors(self, flat: int, start: int, numel: int) -> dict[str, torch.Tensor]:
        """Elements [start, start + numel) of one flat tensor, and of its moments."""
        state = self.states[flat]
        moments = {k: v for k, v in state.items() if k != "step" and torch.is_tensor(v) and v.ndim}
        parts = {WEIGHT: self.flats[flat], **moments}
        return {kind: tensor.view(-1).narrow(0, start, numel) for kind, tensor in parts.items()}


class Native:
    """Opens nothing that asks for code. Raises Unusable where it is not whole, or of another kind.

    `stage`: 1, 2 or 3. `ds_config`: the JSON that it was trained with.
    """

    def __init__(self, folder: Path) -> None:
        found = {m: path for path in folder.iterdir() if (m := _OPTIM.fullmatch(path.name))}
        self._optim = {int(match[1]): path for match, path in found.items()}
        if {int(match[2]) for match in found} - {0} or any(folder.glob("layer_*")):
            raise Unusable(f"{folder} was split over pipeline stages or tensors: not imported")
        if not found:
            raise Unusable(f"{folder} has no *_optim_states.pt of ZeRO 1, 2 or 3")
        first = read(self._optim[min(self._optim)])
        state = first["optimizer_state_dict"]
        self.stage, self.ds_config = int(state.get("zero_stage", 1)), first.get("ds_config", {})
        counts = state.get("partition_count", len(self._optim))
        self.ranks = counts if isinstance(counts, int) else max(counts)
        if sorted(self._optim) != list(range(self.ranks)):
            raise Unusable(
                f"{folder} was saved by {self.ranks} ranks, but has the files of "
                f"{', '.join(map(str, sorted(self._optim)))}"
            )
        self._folder = folder
        model = self.model = self._model_states(0)
        groups = model["param_shapes"] or []
        self.shapes = {name: tuple(shape) for group in groups for name, shape in group.items()}
        self.scalars = _scalars(model, self._rank(0))

    def by_rank(self) -> Iterator[list[Fragment]]:
        """What each rank saved, one rank after the other; padding is left out.

        Raises Unusable when together they lack something.
        """
        held: Counter[str] = Counter()
        for number in range(self.ranks):
            rank = self._rank(number)
            own = [*(self._zero3(rank) if self.stage == 3 else self._zero12(rank, held))]
            held.update({fragment.name: fragment.numel for fragment in own})
            yield [*own, *self._frozen(number), *(self._buffers() if number == 0 else ())]
        for name, shape in self.shapes.items():
            if held[name] != math.prod(shape):
                raise Unusable(f"{self._folder} has {held[name]} elements of {name} {shape}")

    def _zero12(self, rank: Rank, before: Counter[str]) -> Iterator[Fragment]:
        """The flat groups are cut into equal shares: a parameter goes on in the next rank's."""
        for flat, places in enumerate(rank.optimizer["param_slice_mappings"]):
            for name, place in places.items():
                tensors = rank.tensors(flat, place.start, place.numel)
                yield Fragment(name, self.shapes[name], before[name], tensors)

    def _zero3(self, rank: Rank) -> Iterator[Fragment]:
        """Every parameter is cut into equal shares, which follow each other in the flat tensors."""
        flat, start = 0, 0
        for name, shape in self.shapes.items():
            numel = math.prod(shape)
            share = math.ceil(numel / self.ranks)
            if start == rank.flats[flat].numel() and flat + 1 < len(rank.flats):
                flat, start = flat + 1, 0
            offset = share * rank.number
            own = min(share, numel - offset)
            if start + share > rank.flats[flat].numel():
                raise Unusable(
                    f"rank {rank.number} in {self._folder} holds {rank.flats[flat].numel()} "
                    f"elements where {name} {shape} goes beyond"
                )
            if own > 0:
                yield Fragment(name, shape, offset, rank.tensors(flat, start, own))
            start += share

    def _frozen(self, rank: int) -> Iterator[Fragment]:
        """Parameters that were not trained are beside the model."""
        if self.stage != 3 and rank > 0:
            return
        model = self._model_states(rank)
        for name, shape in (model.get("frozen_param_shapes") or {}).items():
            held = model["frozen_param_fragments"][name].view(-1)
            offset = held.numel() * rank if self.stage == 3 else 0
            own = min(held.numel(), math.prod(shape) - offset)
            if own > 0:
                yield Fragment(name, tuple(shape), offset, {WEIGHT: held[:own].float()})

    def _buffers(self) -> Iterator[Fragment]:
        for name in self.model["buffer_names"]:
            if name in self.model["module"]:
                buffer = self.model["module"][name]
                yield Fragment(name, tuple(buffer.shape), 0, {BUFFER: buffer.reshape(-1)})

    def _model_states(self, rank: int) -> dict[str, Any]:
        prefix = f"zero_pp_rank_{rank}_" if self.stage == 3 else ""
        return read(self._folder / f"{prefix}mp_rank_00_model_states.pt")

    def _rank(self, number: int) -> Rank:
        optimizer = read(self._optim[number])["optimizer_state_dict"]
        zero3 = self.stage == 3
        base = optimizer.get("optimizer_state_dict" if zero3 else "base_optimizer_state")
        flats = optimizer.get("fp32_flat_groups" if zero3 else "single_partition_of_fp32_groups")
        if not isinstance(base, dict) or not flats or len(base["state"]) != len(flats):
            raise Unusable(f"{self._optim[number]} holds its optimizer in a way not known here")
        return Rank(number, optimizer, flats, [base["state"][n] for n in range(len(flats))])


def _scalars(model: dict[str, Any], rank: Rank) -> dict[str, dict[str, Any]]:
    """Counters, loss scaling and the optimizer's steps, as the manifest holds them."""
    scaler = getattr(rank.optimizer.get("loss_scaler"), "__dict__", {})
    if "cur_iter" not in scaler:  # a scale that the JSON gives, which does not change
        scaler = {}
    groups = (rank.optimizer.get("base_optimizer_state") or {}).get("param_groups", [])
    steps = [held["step"] for held in (*rank.states, *groups) if "step" in held]
    return {
        "counters": {name: int(model.get(name) or 0) for name in _COUNTERS},
        "loss_scaling": {name: scaler[name] for name in _SCALER if name in scaler},
        "optimizer": {"step": float(steps[0])} if steps else {},
    }
