"""Steps that must change nothing on two ranks, in every layout; replicas that differ by one bit."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from harness.engine.deepspeed_0_19.replaced import replaced
from harness.errors import RunStopped
from tests.engine.engines import TESTED, WORLD, cells, engine_of, fp16, share_of
from tests.ranks import ranks


def snapshot(engine: Any) -> list[torch.Tensor]:
    """Return weights, master weights and moments of this rank, however DeepSpeed names them."""
    optimizer = engine.engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    tensors = [getattr(p, "ds_tensor", p) for p in engine._own_module.parameters()]
    for parameter, state in inner.state.items():
        tensors += [parameter, *(v for v in state.values() if torch.is_tensor(v))]
    return [tensor.detach().clone() for tensor in tensors]


def same(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return len(before) == len(after) and all(map(torch.equal, before, after))


@contextlib.contextmanager
def gradient_of(engine: Any, value: float) -> Iterator[None]:
    """Set one element of one weight's gradient, in one micro-batch and only on the last rank."""
    once = iter([True])

    def plant(gradient: torch.Tensor) -> torch.Tensor:
        if next(once, False):
            gradient = gradient.clone()
            gradient.view(-1)[0] = value
        return gradient

    hooks = []
    if WORLD.rank == WORLD.world_size - 1:
        parameters = engine._own_module.named_parameters()
        norms = [p for name, p in parameters if name.endswith("norm.weight")]
        hooks = [norms[-1].register_hook(plant)]
    yield
    for hook in hooks:
        hook.remove()


@contextlib.contextmanager
def loss_of(value: float) -> Iterator[None]:
    """Replace only the loss, only on the last rank; its gradients stay finite."""
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


def train_around_bad_steps(engine: Any) -> None:
    """Take good steps, with six steps in between that must change nothing. Collective."""

    def take(number: int, skip_rule: Any = None, learns: bool = True) -> Any:
        batches, targets = share_of(engine, number)
        return engine.train_batch(batches, targets if learns else 0, 1e-3, skip_rule)

    def bad(number: int, skip_rule: Any = None, learns: bool = True, finite: bool = False) -> None:
        before, skipped, scale = snapshot(engine), engine.skipped_steps, engine.loss_scale
        result = take(number, skip_rule, learns)
        assert same(before, snapshot(engine))
        assert not engine.step_applied
        assert engine.skipped_steps - skipped == 1
        assert engine.loss_scale / scale == 1
        assert math.isfinite(float(result.grad_norm)) == finite

    with gradient_of(engine, math.nan):
        bad(0)  # before moments exist
    take(1)
    with gradient_of(engine, math.nan):
        bad(2)
    with gradient_of(engine, math.inf):
        bad(3)
    with loss_of(math.nan):
        bad(4)
    norms: list[float] = []
    bad(5, lambda share, norm: not norms.append(float(norm)), finite=True)
    bad(5, learns=False, finite=True)
    before = snapshot(engine)
    result = take(6, lambda share, norm: bool(norms.append(float(norm))))
    assert norms[1] == pytest.approx(float(result.grad_norm), rel=1e-5)
    assert engine.step_applied
    assert not same(before, snapshot(engine))
    assert engine.skipped_steps == 6


def agree(masters: dict[str, torch.Tensor]) -> bool:
    """Return True if all ranks have the same weights. Collective."""
    sums = torch.stack([master.double().sum() for master in masters.values()])
    everyone = [torch.empty_like(sums) for _ in range(WORLD.world_size)]
    dist.all_gather(everyone, sums)
    return all(torch.equal(other, sums) for other in everyone)


def masters_after(ds: str | dict[str, Any], *steps: int) -> dict[str, torch.Tensor]:
    """Return the weights of an engine that took only good steps. Collective."""
    engine = engine_of(ds)
    for number in steps:
        engine.train_batch(*share_of(engine, number), 1e-3)
    masters = dict(engine.masters())
    engine.close()
    return masters


def equal(masters: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(masters[name], master) for name, master in others.items())


USUAL = ("zero3 bf16 fp32_sums", "zero1 fp16 pipeline2")


@pytest.mark.parametrize("layout", cells(TESTED["bad_steps"], USUAL))
@ranks(2)
def test_a_step_that_is_not_finite_or_a_spike_changes_no_bit(layout: str) -> None:
    """Neither weights nor moments change: the run equals one without such steps."""
    engine = engine_of(layout)
    train_around_bad_steps(engine)
    masters = dict(engine.masters())
    engine.close()
    assert agree(masters)
    assert equal(masters, masters_after(layout, 1, 6))


@pytest.mark.parametrize("layout", cells(["zero2", "zero0", "zero3", "zero1 pipeline2"]))
@ranks(2)
def test_clipping_by_value_hides_no_infinity(layout: str) -> None:
    train_around_bad_steps(engine_of(layout, optim={"clip_value": 1e-3}))


@pytest.mark.parametrize("layout", cells(["zero1", "zero2", "zero3"], ("zero1",)))
@ranks(2)
def test_the_engine_can_go_on_after_the_minimum_loss_scale(layout: str) -> None:
    """Like a run that then returns to a checkpoint."""
    engine = engine_of(fp16(layout, min_loss_scale=2**32))
    before = snapshot(engine)
    with pytest.raises(RunStopped):
        engine.train_batch(*share_of(engine), 1e-3)
    assert same(before, snapshot(engine))
    engine.engine.optimizer.loss_scaler.cur_scale = 64.0
    engine.train_batch(*share_of(engine, 1), 1e-3)
    masters = dict(engine.masters())
    engine.close()
    assert equal(masters, masters_after(fp16(layout, initial_scale_power=6), 1))


def outliers(engine: Any) -> dict[str, list[int]]:
    """Return the ranks that differ from the majority, by weight name. Collective."""
    from harness.guard.replicas import checksums, outside_majority

    replicas = [*engine.replicated()]
    sums = checksums([r.tensor for r in replicas], engine.group_of("stage"), engine.device)
    ranks_by_name = {r.name: outside_majority(s) for r, s in zip(replicas, sums, strict=True)}
    return {name: ranks for name, ranks in ranks_by_name.items() if ranks}


USUAL_REPLICAS = ("zero2 bf16 fp32_sums", "zero1 pipeline2")


@pytest.mark.parametrize("layout", cells(TESTED["replicas"], USUAL_REPLICAS))
@ranks(2)
def test_one_flipped_bit_names_the_weight(layout: str) -> None:
    """Without replicas nothing is compared: here a stage has one data rank."""
    engine = engine_of(layout)
    engine.train_batch(*share_of(engine), 1e-3)
    replicated = [replica.tensor for replica in engine.replicated()]
    has_copies = layout not in ("zero3", "zero1 pipeline2")
    assert bool(replicated) == has_copies
    assert outliers(engine) == {}
    if WORLD.rank == 1 and replicated:
        integer = {2: torch.int16, 4: torch.int32}[replicated[-1].element_size()]
        replicated[-1].view(-1).view(integer)[-1] ^= 1
    assert [*outliers(engine).values()] == ([[0, 1]] if has_copies else [])


@ranks(2)
def test_weights_that_are_still_being_gathered_are_not_compared() -> None:
    """ZeRO 3 gathers weights after an evaluation, for a backward pass that never comes."""
    engine = engine_of("zero3")
    for _ in range(3):  # it prefetches once it has seen the order twice
        engine.train_batch(*share_of(engine), 1e-3)
    engine.eval_batch(share_of(engine)[0])
    assert any(p.numel() == p.ds_numel for p in engine._own_module.parameters())
    assert not [*engine.replicated()]


def test_replaced_attributes_are_restored() -> None:
    class Thing:
        def step(self) -> str:
            return "own"

    thing = Thing()
    for _ in range(2):
        with replaced(thing, "step", lambda: "other"), replaced(thing, "new", 1):
            assert (thing.step(), thing.new) == ("other", 1)  # type: ignore[attr-defined]
        assert vars(thing) == {}
        assert thing.step() == "own"
    vars(thing)["new"] = 0
    with replaced(thing, "new", 1):
        pass
    assert vars(thing) == {"new": 0}


@ranks(2)
def test_a_norm_above_what_fp16_holds_is_not_an_overflow() -> None:
    """The sums are in fp16, the norm of all of them is not."""
    engine = engine_of("zero1 fp16")
    engine.accumulate(*share_of(engine))
    for part in engine.engine.optimizer.averaged_gradients[0]:
        part.fill_(1000.0)
    engine.apply(1e-3)
    assert engine.step_applied
    assert float(engine.engine.get_global_grad_norm()) * 64 > torch.finfo(torch.float16).max
