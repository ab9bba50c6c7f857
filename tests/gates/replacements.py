"""The replacements for targets of planted defects: see defects.py."""

import itertools
from collections import deque
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from harness.checkpoint.index import BUFFER, WEIGHT
from harness.layout.world import World
from harness.models.units import decoder_layers
from tests.gates import recipe
from tests.gates.cell import GLOBAL_BATCH
from tests.gates.models import SEQ_LEN
from tests.gates.recipe import global_batch, targets

# Samples, and sums of their losses.


def drop_sample(batches: list[Any], world: World) -> None:
    if world.rank == world.world_size - 1:
        batches[0].labels[-1] = -100


def train_prompts(batches: list[Any], world: World) -> None:
    for batch in batches:
        batch.labels[:, :-1] = batch.input_ids[:, 1:]


def unshift(batches: list[Any], world: World) -> None:
    for batch in batches:
        torch.where(batch.labels == -100, batch.labels, batch.input_ids, out=batch.labels)


def number_on(batches: list[Any], world: World) -> None:
    for batch in batches:
        batch.position_ids[:] = torch.arange(SEQ_LEN)


def mean_of_means(loss: Any, balancing: Any, labels: torch.Tensor, world: World) -> Any:
    total = targets(global_batch(0))  # equal in every step
    share = total * len(labels) / GLOBAL_BATCH
    return loss * (share / (labels != -100).sum().clamp(min=1)), balancing


def mean_of_own_targets(loss: Any, balancing: Any, labels: torch.Tensor, world: World) -> Any:
    """Return the loss divided by this rank's own targets; NaN if its part of the rows has none."""
    own = (labels.chunk(2, 1)[world.rank % 2] != -100).sum()
    return loss / own * own, balancing


def evaluated_means(evaluate: Any, world: World) -> Any:
    def eval_batch(engine: Any, batches: list[Any], *_: Any) -> torch.Tensor:
        sums = torch.stack([evaluate(engine, [batch]) for batch in batches])
        return torch.stack([(sums[:, 0] / sums[:, 1].clamp(min=1)).sum(), (sums[:, 1] > 0).sum()])

    return eval_batch


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        context.factor = factor
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * context.factor, None


# The optimizer.


def with_empty_first_step(original: Any, world: World) -> Any:
    """Return a step after an empty one, of which only Adam's step count remains."""

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = [
            (p, p.grad) for g in self.param_groups for p in g["params"] if p.grad is not None
        ]
        if gradients and not any(self.state[parameter] for parameter, _ in gradients):
            rates = [group["lr"] for group in self.param_groups]
            for group in self.param_groups:
                group["lr"] = 0.0
            for parameter, gradient in gradients:
                parameter.grad = torch.zeros_like(gradient)
            original(self, *args, **kwargs)
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate
            for parameter, gradient in gradients:
                parameter.grad = gradient
        return original(self, *args, **kwargs)

    return step


def rate_of_last_step(original: Any, world: World) -> Any:
    def apply(self: Any, lr: float, *more: Any) -> Any:
        late, self.late = getattr(self, "late", lr), lr
        return original(self, late, *more)

    return apply


def clipped_norm(original: Any, world: World) -> Any:
    return lambda self, *inputs: min(float(original(self, *inputs)), recipe.CLIP_NORM)


def use_l2(config: dict[str, Any], groups: Any) -> None:
    config["optimizer"]["type"] = "Adam"
    config["optimizer"]["params"]["adam_w_mode"] = False


def rate_of_first_group(engine: Any, world: World) -> None:
    for group in engine.optimizer.param_groups[1:]:
        group["lr"] = recipe.LR * group["lr_multiplier"]


def rate_times_ranks(engine: Any, world: World) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] *= world.world_size


def forget_moments(engine: Any, world: World) -> None:
    for state in engine.optimizer.state.values():
        if "exp_avg" in state:
            state["exp_avg"].zero_()


def round_masters(engine: Any, world: World) -> None:
    for group in engine.optimizer.param_groups:
        for master in group["params"]:
            master.data.copy_(master.data.bfloat16())


# The model, and recomputed activations.


def layers_swapped(original: Any, world: World) -> Any:
    def forward(self: Any, inputs: Any) -> Any:
        first, second, *_ = decoder_layers(self.model)[1]
        if self.enter is not None:  # not the first stage
            return original(self, inputs)
        swapped = second.forward, first.forward
        with (
            mock.patch.object(first, "forward", swapped[0]),
            mock.patch.object(second, "forward", swapped[1]),
        ):
            return original(self, inputs)

    return forward


def bounds_late(in_turn: Any, world: World) -> Any:
    def late(q: Any, k: Any, v: Any, bounds: torch.Tensor, *more: Any, **how: Any) -> Any:
        bounds = torch.cat([bounds[:1], bounds[1:-1] + 1, bounds[-1:]])
        return in_turn(q, k, v, bounds, *more, **how)

    return late


class Swapped(deque[Any]):
    """Results in which equally shaped neighbours, an MLP's gate and up, are swapped."""

    def popleft(self) -> Any:
        first = super().popleft()
        both = [first, *itertools.islice(self, 1)]
        shapes = {x.shape if isinstance(x, torch.Tensor) else None for x in both}
        if len(both) == 2 and len(shapes) == 1 and None not in shapes:
            first, self[0] = self[0], first
        return first


def host_memory_reused(make: Any, world: World) -> Any:
    memory: dict[Any, torch.Tensor] = {}

    def shared(self: Any, tensor: torch.Tensor, buffers: Any) -> None:
        make(self, tensor, buffers)
        self.copy = memory.setdefault((tensor.shape, tensor.dtype), self.copy).copy_(tensor)

    return shared


def constant_tiles(checkpoint: Any, world: World) -> Any:
    count = itertools.count()

    def some(inner: Any, *inputs: torch.Tensor, use_reentrant: bool) -> Any:
        output = checkpoint(inner, *inputs, use_reentrant=use_reentrant)
        return output.detach() if next(count) % 3 == 0 else output

    return some


def overwrite(total: torch.Tensor, slope: torch.Tensor, weight: torch.Tensor) -> None:
    total.copy_(slope @ weight)


# Tensor, sequence and expert parallelism.


def averaged_over_the_holders(original: Any, world: World) -> Any:
    def initialize(**kwargs: Any) -> Any:
        from deepspeed.utils import groups

        engine, *rest = original(**kwargs)
        engine.optimizer.expert_dp_process_group = {**groups._EXPERT_PARALLEL_GROUP}
        return engine, *rest

    return initialize


def token_dropped(reordered: Any, world: World) -> Any:
    def drop(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        kept = torch.ones_like(rows[:, :1])
        kept[0] = 0
        return reordered(rows, order) * kept

    return drop


def positions_of_rank_0(keywords: Any, world: World) -> Any:
    def first(rows: Any, input_ids: Any, positions: Any) -> dict[str, Any]:
        whole = keywords(rows, input_ids, positions)
        part = whole["position_ids"].shape[1]
        return {**whole, "position_ids": positions[:, :part]}

    return first


def mark_all(module: Any, _: Any) -> None:
    parameter: Any
    for parameter in module.parameters():
        parameter.is_copy, parameter.tensor_model_parallel = False, True


def heads_undivided(divide: Any, world: World) -> Any:
    def divide_all_but_heads(model: Any, *rest: Any) -> Any:
        heads = [(m, m.num_heads) for m in model.modules() if hasattr(m, "num_heads")]
        divided = divide(model, *rest)
        for attention, number in heads:
            attention.num_heads = number
        return divided

    return divide_all_but_heads


def biased_everywhere(row: Any, world: World) -> Any:
    def biased(module: Any, *rest: Any, **how: Any) -> Any:
        forward = row(module, *rest, **how)
        return lambda inputs: forward(inputs) + (0 if module.bias is None else module.bias)

    return biased


def padding_learned(embedding: Any, world: World) -> Any:
    def without(module: Any, group: Any) -> Any:
        padding, module.padding_idx = module.padding_idx, None
        try:
            return embedding(module, group)
        finally:
            module.padding_idx = padding

    return without


# Preference pairs.


def with_pairs(**changes: Any) -> Any:
    """Return a change of the fields of a micro-batch's pairs."""

    def change(original: Any, _: World) -> Any:
        def pairs_of(*args: Any) -> Any:
            if (pairs := original(*args)) is None:
                return None
            fields = {name: change(getattr(pairs, name)) for name, change in changes.items()}
            return replace(pairs, **fields)

        return pairs_of

    return change


# Checkpoints.

SWAPPED_MOMENTS = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}


def masters_rounded(fill: Any, name: str, kind: str, offset: int, out: torch.Tensor) -> None:
    fill(name, kind, offset, out)
    if kind == WEIGHT:
        out.copy_(out.bfloat16())


def buffers_left_out(fill: Any, name: str, kind: str, offset: int, out: torch.Tensor) -> None:
    if kind == BUFFER:
        out.zero_()
    else:
        fill(name, kind, offset, out)
