"""Checks of steps that must change nothing, on two ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.engine.pipeline_checks import pipeline
from tests.engine.rank import STAGES, WORLD, engine_of, fp16, run_checks, share_of, stage

BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
STATIC = {"fp16": {"enabled": True, "loss_scale": 64}}
LAYOUTS: dict[str, dict[str, Any]] = {
    **{f"zero{n}-fp32": stage(n) for n in STAGES},
    **{f"zero{n}-bf16": {**stage(n), **BF16} for n in STAGES[1:]},
    "zero1-bf16-sums-bf16": {**stage(1), "bf16": {"enabled": True}},
    **{f"zero{n}-fp16": {**stage(n), **STATIC} for n in STAGES[1:]},
    "offload2-fp32": {"zero_optimization": {"stage": 2, **OFFLOAD}},
    "offload2-bf16": {"zero_optimization": {"stage": 2, **OFFLOAD}, **BF16},
    "offload3-fp32": {"zero_optimization": {**stage(3)["zero_optimization"], **OFFLOAD}},
    "pipeline0-fp32": pipeline(0),
    "pipeline1-fp32": pipeline(1),
    "pipeline0-bf16": pipeline(0, bf16={"enabled": True}),
    "pipeline1-bf16": pipeline(1, **BF16),
    "pipeline1-fp16": pipeline(1, **STATIC),
}
CLIPPED = ("zero0-fp32", "zero2-fp32", "zero3-fp32", "pipeline1-fp32")


def snapshot(engine: Any) -> list[torch.Tensor]:
    """Weights, master weights and moments of this rank, whatever DeepSpeed calls them."""
    optimizer = engine.engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    tensors = [getattr(p, "ds_tensor", p) for p in engine._held.parameters()]
    for parameter, state in inner.state.items():
        tensors += [parameter, *(v for v in state.values() if torch.is_tensor(v))]
    return [tensor.detach().clone() for tensor in tensors]


def same(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return len(before) == len(after) and all(map(torch.equal, before, after))


@contextlib.contextmanager
def gradient_of(engine: Any, value: float) -> Iterator[None]:
    """On the last rank alone, one weight's gradient holds one such element, of one micro-batch."""
    once = iter([True])

    def plant(gradient: torch.Tensor) -> torch.Tensor:
        if next(once, False):
            gradient = gradient.clone()
            gradient.view(-1)[0] = value
        return gradient

    hooks = []
    if WORLD.rank == WORLD.world_size - 1:
        last = [p for name, p in engine._held.named_parameters() if name.endswith("norm.weight")][
            -1
        ]
        hooks = [last.register_hook(plant)]
    yield
    for hook in hooks:
        hook.remove()


@contextlib.contextmanager
def loss_of(value: float) -> Iterator[None]:
    """The loss alone is no number, on the last rank alone: its gradients are finite."""
    from harness.engine import forward as forward_room
    from harness.engine import pipeline as pipeline_room

    def spoil(losses: Any) -> Any:
        added = value if WORLD.rank == WORLD.world_size - 1 else 0.0
        return losses[0] + added, losses[1]

    forward, losses = forward_room.forward, pipeline_room.losses
    with (
        mock.patch.object(forward_room, "forward", lambda *a: spoil(forward(*a))),
        mock.patch.object(pipeline_room, "losses", lambda *a: spoil(losses(*a))),
    ):
        yield


def steps_around(ds: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """Good steps, and between them steps that must change nothing."""
    engine = engine_of(ds, **sections)
    facts: dict[str, Any] = {}

    def take(number: int, is_spike: Any = None, learns: bool = True) -> Any:
        batches, targets = share_of(engine, number)
        return engine.train_batch(batches, targets if learns else 0, 1e-3, is_spike)

    def bad(name: str, number: int, is_spike: Any = None, learns: bool = True) -> None:
        before, skipped = snapshot(engine), engine.skipped_steps
        scale = engine.loss_scale
        result = take(number, is_spike, learns)
        facts[name] = {
            "unchanged": same(before, snapshot(engine)),
            "applied": engine.step_applied,
            "counted": engine.skipped_steps - skipped,
            "scale": engine.loss_scale / scale,
            "norm": repr(float(result.grad_norm)),
        }

    with gradient_of(engine, float("nan")):
        bad("first", 0)  # before there are moments
    take(1)
    with gradient_of(engine, float("nan")):
        bad("nan", 2)
    with gradient_of(engine, float("inf")):
        bad("inf", 3)
    with loss_of(float("nan")):
        bad("loss", 4)
    asked = []
    bad("spike", 5, lambda share, norm: not asked.append(float(norm)))
    bad("no target", 5, learns=False)
    before = snapshot(engine)
    result = take(6, lambda share, norm: bool(asked.append(float(norm))))
    facts["norms"] = [asked[1], float(result.grad_norm)]
    facts["trains"] = engine.step_applied and not same(before, snapshot(engine))
    facts["skipped"] = engine.skipped_steps
    masters = dict(engine.masters())
    sums = torch.stack([m.double().sum() for m in masters.values()])
    everyone = [torch.empty_like(sums) for _ in range(WORLD.world_size)]
    dist.all_gather(everyone, sums)
    facts["agree"] = all(torch.equal(other, sums) for other in everyone)
    engine.close()

    plain = engine_of(ds, **sections)  # which never met the bad steps
    plain.train_batch(*share_of(plain, 1), 1e-3)
    plain.train_batch(*share_of(plain, 6), 1e-3)
    facts["as_if_never"] = all(torch.equal(m, masters[name]) for name, m in plain.masters())
    plain.close()
    return facts


def bad_steps_change_nothing() -> dict[str, Any]:
    return {name: steps_around(ds) for name, ds in LAYOUTS.items()}


def bad_steps_change_nothing_where_values_are_clipped() -> dict[str, Any]:
    clip = {"optim": {"clip_value": 1e-3}}
    return {name: steps_around(LAYOUTS[name], **clip) for name in CLIPPED}


def goes_on_after_the_minimum_loss_scale() -> dict[str, Any]:
    """As a run does that goes back to a checkpoint then."""
    from harness.errors import RunStopped

    facts = {}
    for number in STAGES[1:]:
        engine = engine_of({**fp16(min_loss_scale=2**32), **stage(number)})
        before = snapshot(engine)
        try:
            engine.train_batch(*share_of(engine), 1e-3)
            stopped = False
        except RunStopped:
            stopped = True
        unchanged = same(before, snapshot(engine))
        engine.engine.optimizer.loss_scaler.cur_scale = 64.0
        engine.train_batch(*share_of(engine, 1), 1e-3)
        masters = dict(engine.masters())
        engine.close()
        plain = engine_of({**fp16(initial_scale_power=6), **stage(number)})
        plain.train_batch(*share_of(plain, 1), 1e-3)
        as_if_never = all(torch.equal(m, masters[name]) for name, m in plain.masters())
        plain.close()
        facts[str(number)] = [stopped, unchanged, as_if_never]
    return facts


def zero_0_steps_with_nan() -> dict[str, Any]:
    """DeepSpeed by itself."""
    engine = engine_of(stage(0))
    with gradient_of(engine, float("nan")):
        engine.accumulate(*share_of(engine))
    engine.engine.step()
    facts = {
        "applied": engine.step_applied,
        "finite": all(bool(w.isfinite().all()) for _, w in engine.masters()),
    }
    engine.close()
    return facts


def offloading_keeps_the_gradients_of_a_skipped_step() -> dict[str, Any]:
    """Without our workaround, and with it: was the step after one with NaN applied?"""
    from harness.engine.deepspeed_0_19 import settlements

    facts = {}
    for who in ("deepspeeds", "ours"):
        with contextlib.ExitStack() as without:
            if who == "deepspeeds":
                nothing = mock.patch.object(settlements, "drop_skipped_gradients")
                without.enter_context(nothing)
            engine = engine_of(LAYOUTS["offload2-bf16"])
            with gradient_of(engine, float("nan")):
                engine.train_batch(*share_of(engine), 1e-3)
            engine.train_batch(*share_of(engine), 1e-3)
        facts[who] = engine.step_applied
        engine.close()
    return facts


def flipped_bit_is_found() -> dict[str, Any]:
    """Replicas that are equal, and one that differs in one bit."""
    from harness.guard.replicas import checksums, outside_majority

    def outliers(engine: Any) -> dict[str, list[int]]:
        replicas = [*engine.replicated()]
        sums = checksums([r.tensor for r in replicas], engine.group_of("stage"), engine.device)
        outliers_by_name = {
            r.name: outside_majority(s) for r, s in zip(replicas, sums, strict=True)
        }
        return {name: ranks for name, ranks in outliers_by_name.items() if ranks}

    facts = {}
    for name in ("zero0-fp32", "zero2-bf16", "zero3-fp32", "zero3-bf16-whole", "pipeline1-fp32"):
        ds = LAYOUTS.get(name, {"zero_optimization": {"stage": 3}, **BF16})
        engine = engine_of(ds)
        engine.train_batch(*share_of(engine), 1e-3)
        replicated = [replica.tensor for replica in engine.replicated()]
        equal = outliers(engine)
        if WORLD.rank == 1 and replicated:
            weight = replicated[-1].view(-1)
            size = {2: torch.int16, 4: torch.int32}[weight.element_size()]
            weight.view(size)[-1] ^= 1
        differ = outliers(engine)
        facts[name] = [len(replicated), equal, differ]
        engine.close()
    return facts


def weights_in_flight_are_not_compared() -> dict[str, int]:
    """The weights that ZeRO-3 gathers after evaluation, for a backward pass that never comes."""
    engine = engine_of(LAYOUTS["zero3-fp32"])
    for _ in range(3):  # it gathers ahead once it has seen the order twice
        engine.train_batch(*share_of(engine), 1e-3)
    engine.eval_batch(share_of(engine)[0])
    weights = [p for p in engine._held.parameters() if p.numel() == p.ds_numel]
    facts = {"gathered": len(weights), "compared": len([*engine.replicated()])}
    engine.close()
    return facts


CHECKS = (
    bad_steps_change_nothing,
    bad_steps_change_nothing_where_values_are_clipped,
    goes_on_after_the_minimum_loss_scale,
    zero_0_steps_with_nan,
    offloading_keeps_the_gradients_of_a_skipped_step,
    flipped_bit_is_found,
    weights_in_flight_are_not_compared,
)


def main() -> None:
    run_checks(CHECKS)


if __name__ == "__main__":
    main()
