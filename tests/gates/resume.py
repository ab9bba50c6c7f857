"""Half a round trip on one rank: train and save; or load, save again and continue."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from harness.checkpoint.index import BUFFER, WEIGHT
from harness.checkpoint.manifest import Checkpoint, Manifest, TrainState
from harness.checkpoint.reader import Reader
from harness.checkpoint.save import Saver
from harness.checkpoint.store import Retention, Store, verified
from harness.errors import Unusable
from harness.layout.world import World
from harness.run.saving import load_into
from tests.gates.cell import Job
from tests.gates.engines import build_engine, take_steps
from tests.gates.models import FROZEN
from tests.gates.recipe import ADAMW, LR
from tests.gates.trajectory import Trajectory

STEPS_BEFORE, STEPS_AFTER = 3, 3
FP16_SCALE = 2.0**10  # far below the scale at which any layout overflows, after the step that did
_NOTHING: dict[str, dict[str, Any]] = {"counters": {}, "loss_scaling": {}, "optimizer": {}}
# A matrix that is partitioned, and a vector that ZeRO 3 may keep whole.
FROZEN_WEIGHTS = ("model.layers.0.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight")
BUFFERS = {"steps_seen": torch.tensor(7), "load": torch.tensor([0.25, -3.0, 1e-3, 5.0, 0.125])}
BLANK_SEED = 1
"""Seed of models to be loaded: their previous values appear nowhere in the checkpoint."""


@contextlib.contextmanager
def built_as(architecture: str) -> Iterator[None]:
    """Freeze parameters and register buffers of the architecture in engines built in the body."""
    if architecture != FROZEN:
        yield
        return
    from harness.engine import build, stages

    def frozen(plan: Any, *args: Any, **kwargs: Any) -> Any:
        model = original(plan, *args, **kwargs)
        for name in FROZEN_WEIGHTS:
            model.get_parameter(name).requires_grad_(False)
        for name, value in BUFFERS.items():
            blank = plan.config.train.seed == BLANK_SEED
            model.model.layers[1].register_buffer(name, value * 0 if blank else value.clone())
        return model

    original = build.empty_model
    with (
        mock.patch.object(build, "empty_model", frozen),
        mock.patch.object(stages, "empty_model", frozen),
    ):
        yield


def save(job: Job, world: World, device: torch.device, out: Path) -> Trajectory:
    """Train, save, and continue."""
    with contextlib.closing(_engine(job, world, device, out, seed=0)) as engine:
        first = 0
        if job.cell.precision == "fp16":
            _train(engine, 0, 1)
            assert engine.skipped_steps == 1, "the first step was to overflow"
            # Twenty more steps would reach the same scale.
            engine.restore_scalars({**_NOTHING, "loss_scaling": {"cur_scale": FP16_SCALE}})
            first = 1
        _train(engine, first, STEPS_BEFORE)
        saved = _saved(engine, out / job.saved)
        result = _train(engine, STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER)
        result.differences = _missing(engine, saved)
    return result


def resume(job: Job, world: World, device: torch.device, out: Path) -> Trajectory:
    """Load a checkpoint, save it again, compare the two, and continue."""
    with contextlib.closing(_engine(job, world, device, out, seed=BLANK_SEED)) as engine:
        first = verified(out / job.saved / "step-00000003")
        load_into(engine, first)
        lines = []
        if not job.micro_batch:
            again = out / "again" / job.result
            second = _saved(engine, again)
            lines = gathered(differences(first, second, world.rank, world.world_size))
            dist.barrier()
            if world.rank == 0:
                shutil.rmtree(again)
        result = _train(engine, STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER)
        result.differences = lines
    return result


def _engine(job: Job, world: World, device: torch.device, out: Path, seed: int) -> Any:
    """Return a new engine; with BLANK_SEED, one that expects a checkpoint."""
    micro_batch = job.micro_batch or job.cell.micro_batch
    plan = job.cell.plan(world, out, ADAMW, seed=seed, micro_batch=micro_batch)
    with built_as(job.cell.architecture):
        return build_engine(plan, device, blank=seed == BLANK_SEED)


def _train(engine: Any, first: int, end: int) -> Trajectory:
    """Take steps; return their results."""
    result = Trajectory()
    take_steps(engine, range(first, end), lambda _: LR, result)
    return result


def _saved(engine: Any, folder: Path) -> Checkpoint:
    """Save as a run does, but without a run; return the checkpoint."""
    plan = engine.plan
    manifest = Manifest(
        state=TrainState(STEPS_BEFORE),
        precision=plan.precision,
        model_config=plan.model_config,
        data_fingerprint=None,
        engine=engine.scalars(),
        probe_loss=None,
        held_out_loss=None,
        about={"deepspeed": plan.deepspeed},
    )
    saver = Saver(Store(folder), plan.world.rank, Retention())
    saver.start(manifest, engine.fragments(), {}, background=False)
    saver.finish()
    return verified(folder / "step-00000003")


def gathered(lines: list[str]) -> list[str]:
    """Return the distinct lines of all ranks. Collective."""
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, lines)
    return sorted({item for items in by_rank for item in items})


def _missing(engine: Any, saved: Checkpoint) -> list[str]:
    """Return the tensors of the model and its optimizer that the checkpoint lacks."""
    reader, lines = Reader.of(saved), []
    expected = {
        name: {WEIGHT, "exp_avg", "exp_avg_sq"} if p.requires_grad else {WEIGHT}
        for name, p in engine.module.named_parameters()
    }
    persistent = engine.module.state_dict().keys()
    expected |= {name: {BUFFER} for name, _ in engine.module.named_buffers() if name in persistent}
    for name in sorted({*expected, *reader.index}):
        kinds = {frozenset(entry.kinds) for entry in reader.index.entries(name)}
        if kinds != {frozenset(expected.get(name, ()))}:
            lines.append(f"{name} is there as {sorted(map(sorted, kinds))}")
    for name, kinds in expected.items():
        if "exp_avg" in kinds and not reader.whole(name, "exp_avg").any():
            lines.append(f"{name} was never trained")
    return lines


def differences(first: Checkpoint, second: Checkpoint, turn: int, turns: int) -> list[str]:
    """Return the differences between two checkpoints; compare every `turns`-th tensor."""
    before, after = Reader.of(first), Reader.of(second)
    names = sorted({*before.index, *after.index})
    lines = [line for name in names[turn::turns] for line in _of_tensor(name, before, after)]
    return lines + _of_scalars(first.manifest.engine, second.manifest.engine)


def _of_tensor(name: str, first: Reader, second: Reader) -> list[str]:
    contents = [_known(reader, name) for reader in (first, second)]
    if contents[0] != contents[1]:
        return [f"{name}: {contents[0]}, then {contents[1]}"]
    lines = []
    for kind in contents[0]["kinds"][0]:
        try:
            before, after = whole(first, name, kind), whole(second, name, kind)
        except Unusable as error:
            lines.append(str(error))
            continue
        unequal = (_bits(before) != _bits(after)) if before.dtype == after.dtype else None
        if unequal is None or bool(unequal.any()):
            how_many = "all of" if unequal is None else f"{int(unequal.sum())} bytes of"
            lines.append(f"{how_many} {name}/{kind} {list(before.shape)} {before.dtype} differ")
    return lines


_fill = Reader.fill


def whole(reader: Reader, name: str, kind: str) -> torch.Tensor:
    """Return one tensor of a checkpoint; defects planted in reading do not affect this function."""
    with mock.patch.object(Reader, "fill", _fill):
        return reader.whole(name, kind)


def _known(reader: Reader, name: str) -> dict[str, Any]:
    """Return a parameter's properties that no layout changes; every element must exist once."""
    entries = reader.index.entries(name)
    return {
        "shape": sorted({entry.part.whole for entry in entries}),
        "kinds": sorted({tuple(sorted(entry.kinds)) for entry in entries}),
        "elements": sum(entry.numel for entry in entries),
    }


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _of_scalars(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return differences of counters, loss scaling and steps; a layout may lack loss scaling."""
    lines = []
    for section, values in before.items():
        common = values.keys() & after[section].keys()
        if section != "loss_scaling" and common != values.keys() | after[section].keys():
            lines.append(f"{section}: {sorted(values)}, then {sorted(after[section])}")
        lines += [
            f"{section}.{key}: {values[key]}, then {after[section][key]}"
            for key in sorted(common)
            if values[key] != after[section][key]
        ]
    return lines
