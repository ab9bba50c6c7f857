"""Reads a folder written by DeepSpeed's save_checkpoint as fragments, without running its code.

Plain classes with the same names replace DeepSpeed's few classes, so DeepSpeed is not imported.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from harness.checkpoint.index import BUFFER, WEIGHT
from harness.checkpoint.tensor_file import DTYPES, Fragment
from harness.config.run_config import run_and_step
from harness.errors import ConfigError, Unusable
from harness.files.regular_file import open_regular, read_json
from harness.files.table import Table
from harness.layout.box import Part
from harness.plan.model_config import find_model_config


class Plain:
    """An object that only carries attributes."""


class Stage(int):
    """Stands in for ZeroStageEnum; holds its number."""


ALLOWED: dict[str, type] = {
    "deepspeed.runtime.zero.config.ZeroStageEnum": Stage,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": type("LossScaler", (Plain,), {}),
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": type("DynamicScaler", (Plain,), {}),
    "deepspeed.utils.tensor_fragment.fragment_address": type("Address", (Plain,), {}),
}


def read(path: Path) -> Table:
    """Return the dict that torch.save wrote to `path`; its tensors stay on disk until they are
    used.

    Raises Unusable before anything is unpickled if the file asks for more than tensors, plain
    values and ALLOWED, or if it is not such a file.
    """
    try:
        open_regular(path, links=True).close()  # refuse a pipe, for which torch would wait
        asked = get_unsafe_globals_in_checkpoint(path)
        refused = sorted(set(asked) - set(ALLOWED))
        if refused:
            raise Unusable(
                f"{path} asks for {', '.join(refused)}, which no checkpoint needs: it was not "
                "opened, because that could run arbitrary code"
            )
        with safe_globals([(kind, name) for name, kind in ALLOWED.items()]):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Unusable:
        raise
    except Exception as error:  # a damaged file fails in many ways
        problem = str(error).splitlines()[0] if str(error) else ""
        raise Unusable(f"{path} cannot be read: {type(error).__name__}: {problem}") from None
    return Table(content, path)


def tensor_of(table: Table, key: object) -> torch.Tensor:
    """Return a flat tensor whose elements are all in the file. Raises Unusable without one."""
    value = table.get(key)
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        table.refuse(table.path_of(key), value, "a tensor")
    if value.dtype not in DTYPES or value.device.type != "cpu":
        table.refuse(table.path_of(key), f"{value.dtype} on {value.device}", "a tensor of numbers")
    if value.nbytes > value.untyped_storage().nbytes():
        table.refuse(table.path_of(key), tuple(value.shape), "the shape of what the file holds")
    return value.detach().reshape(-1)


_OPTIM = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_STEP = "step"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


@dataclass(frozen=True)
class Rank:
    """The state of one data rank; `parts` holds each flat tensor of the optimizer, by kind."""

    number: int
    optimizer: Table
    parts: list[dict[str, torch.Tensor]]
    steps: list[float]

    def numel(self, flat: int) -> int:
        """Return the number of elements in one flat tensor."""
        return self.parts[flat][WEIGHT].numel()

    def tensors(self, flat: int, start: int, numel: int, name: str) -> dict[str, torch.Tensor]:
        """Return elements [start, start + numel) of one flat tensor and of its moments."""
        if start + numel > self.numel(flat):
            raise Unusable(
                f"{self.optimizer.file} holds {self.numel(flat)} elements where {name} goes beyond"
            )
        return {kind: tensor.narrow(0, start, numel) for kind, tensor in self.parts[flat].items()}


class Native:
    """A checkpoint in DeepSpeed's own format. Raises Unusable if it is incomplete, unsafe or of
    another kind.

    `stage` is 1, 2 or 3; `precision` comes from the JSON that it was trained with.
    """

    def __init__(self, folder: Path) -> None:
        matches = {m: path for path in folder.iterdir() if (m := _OPTIM.fullmatch(path.name))}
        self._optim = {int(match[1]): path for match, path in matches.items()}
        if {int(match[2]) for match in matches} - {0} or any(folder.glob("layer_*")):
            raise Unusable(f"{folder} was split over pipeline stages or tensors: not imported")
        if not matches:
            raise Unusable(f"{folder} has no *_optim_states.pt of ZeRO 1, 2 or 3")
        first = read(self._optim[min(self._optim)])
        state = first.table("optimizer_state_dict")
        self.stage = int(state.count("zero_stage")) if "zero_stage" in state else 1
        if self.stage not in (1, 2, 3):
            state.refuse(state.path_of("zero_stage"), self.stage, "1, 2 or 3")
        self.precision = _precision(first)
        self.ranks = _ranks(state, len(self._optim))
        if sorted(self._optim) != list(range(self.ranks)):
            raise Unusable(
                f"{folder} was saved by {self.ranks} ranks, but has the files of "
                f"{', '.join(map(str, sorted(self._optim)))}"
            )
        self.folder = folder
        self.model = self._model_states(0)
        self.shapes: dict[str, tuple[int, ...]] = {}
        for group in (
            self.model.row("param_shapes") if self.model.get("param_shapes") is not None else ()
        ):
            self.shapes |= _shapes(Table(group, self.model.file, "param_shapes"))
        self.scalars = _scalars(self.model, self._rank(0))

    def by_rank(self) -> Iterator[list[Fragment]]:
        """Yield the fragments that each rank saved, without padding.

        Raises Unusable if parts of a tensor are missing.
        """
        saved: Counter[str] = Counter()
        for number in range(self.ranks):
            rank = self._rank(number)
            own = [*(self._zero3(rank) if self.stage == 3 else self._zero12(rank, saved))]
            saved.update({fragment.name: fragment.numel for fragment in own})
            yield [*own, *self._frozen(number), *(self._buffers() if number == 0 else ())]
        for name, shape in self.shapes.items():
            if saved[name] != math.prod(shape):
                raise Unusable(f"{self.folder} has {saved[name]} elements of {name} {shape}")

    def _zero12(self, rank: Rank, before: Counter[str]) -> Iterator[Fragment]:
        """Yield a rank's fragments. Flat groups are cut into equal shares, so a parameter may
        continue in the next rank's share.
        """
        mappings = rank.optimizer.row("param_slice_mappings")
        for flat, places in enumerate(mappings[: len(rank.parts)]):
            table = Table(places, rank.optimizer.file, f"param_slice_mappings.{flat}")
            for name in table.values:
                value = table.get(name)
                place = Table(getattr(value, "__dict__", value), table.file, table.path_of(name))
                start, numel = place.count("start"), place.count("numel")
                tensors = rank.tensors(flat, start, numel, str(name))
                part = Part.of(self._shape(str(name), rank))
                yield Fragment(str(name), part, before[str(name)], tensors)

    def _shape(self, name: str, rank: Rank) -> tuple[int, ...]:
        if name not in self.shapes:
            raise Unusable(f"{rank.optimizer.file} holds {name}, which {self.model.file} lacks")
        return self.shapes[name]

    def _zero3(self, rank: Rank) -> Iterator[Fragment]:
        """Yield a rank's fragments. Every parameter is cut into equal shares, which follow each
        other in the flat tensors.
        """
        flat, start = 0, 0
        for name, shape in self.shapes.items():
            numel = math.prod(shape)
            share = math.ceil(numel / self.ranks)
            if start == rank.numel(flat) and flat + 1 < len(rank.parts):
                flat, start = flat + 1, 0
            offset = share * rank.number
            own = min(share, numel - offset)
            if own > 0:
                yield Fragment(name, Part.of(shape), offset, rank.tensors(flat, start, own, name))
            start += share

    def _frozen(self, rank: int) -> Iterator[Fragment]:
        """Yield a rank's frozen parameters, which are saved in the model file."""
        if self.stage != 3 and rank > 0:
            return
        model = self._model_states(rank)
        if not model.has("frozen_param_shapes"):
            return
        weights = model.table("frozen_param_fragments")
        for name, shape in _shapes(model.table("frozen_param_shapes")).items():
            weight = tensor_of(weights, name)
            offset = weight.numel() * rank if self.stage == 3 else 0
            own = min(weight.numel(), math.prod(shape) - offset)
            if own > 0:
                yield Fragment(name, Part.of(shape), offset, {WEIGHT: weight[:own].float()})

    def _buffers(self) -> Iterator[Fragment]:
        module = self.model.table("module")
        for name in self.model.texts("buffer_names"):
            if name in module:
                buffer = tensor_of(module, name)
                shape = tuple(module.get(name).shape)  # type: ignore[attr-defined]
                yield Fragment(name, Part.of(shape), 0, {BUFFER: buffer})

    def _model_states(self, rank: int) -> Table:
        prefix = f"zero_pp_rank_{rank}_" if self.stage == 3 else ""
        return read(self.folder / f"{prefix}mp_rank_00_model_states.pt")

    def _rank(self, number: int) -> Rank:
        optimizer = read(self._optim[number]).table("optimizer_state_dict")
        zero3 = self.stage == 3
        base_key = "optimizer_state_dict" if zero3 else "base_optimizer_state"
        flats_key = "fp32_flat_groups" if zero3 else "single_partition_of_fp32_groups"
        if not isinstance(optimizer.get(base_key), dict) or not optimizer.row(flats_key):
            raise Unusable(f"{self._optim[number]} holds its optimizer in an unknown format")
        base = optimizer.table(base_key)
        states = base.table("state")
        flats = Table(
            dict(enumerate(optimizer.row(flats_key))), optimizer.file, optimizer.path_of(flats_key)
        )
        if len(states.values) != len(flats.values):
            raise Unusable(f"{self._optim[number]} holds its optimizer in an unknown format")
        steps = _steps([states.table(n) for n in flats.values])
        if not zero3 and "param_groups" in base:
            groups = dict(enumerate(base.row("param_groups")))
            steps += _steps([Table(g, base.file, "param_groups") for g in groups.values()])
        return Rank(number, optimizer, [_parts(flats, states, n) for n in flats.values], steps)


def _parts(flats: Table, states: Table, number: object) -> dict[str, torch.Tensor]:
    """Return one flat tensor and the optimizer's moments of it, by kind."""
    weight, state = tensor_of(flats, number), states.table(number)
    moments = {
        str(kind): tensor_of(state, kind)
        for kind, value in state.values.items()
        if kind != _STEP and isinstance(value, torch.Tensor) and value.ndim
    }
    for kind, moment in moments.items():
        if moment.numel() != weight.numel():
            raise Unusable(
                f"{state.file}: {state.path_of(kind)} has {moment.numel()} elements, its weights "
                f"are {weight.numel()} elements"
            )
    return {WEIGHT: weight, **moments}


def _steps(tables: list[Table]) -> list[float]:
    """Return the optimizer's step counts, from whichever tables hold them."""
    steps = []
    for table in tables:
        if _STEP in table:
            value = table.get(_STEP)
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.item()
            steps.append(Table({_STEP: value}, table.file, table.key).number(_STEP))
    return steps


def _shapes(table: Table) -> dict[str, tuple[int, ...]]:
    """Return the parameters' shapes by name."""
    return {str(name): table.counts(name) for name in table.values}


def _ranks(state: Table, files: int) -> int:
    """Return the number of data ranks that saved: the state has one number, or one per group."""
    key = "partition_count"
    if key not in state:
        return files
    if isinstance(state.get(key), int):
        return state.count(key)
    return max(state.counts(key), default=0)


def _precision(first: Table) -> str:
    """Return the precision in the DeepSpeed JSON saved with the checkpoint; fp32 without one."""
    if "ds_config" not in first:
        return "fp32"
    config = first.table("ds_config")
    for name in ("bf16", "fp16"):
        enabled = config.table(name).values.get("enabled") if config.has(name) else False
        if isinstance(enabled, bool | str) and enabled:
            return name
    return "fp32"


def _scalars(model: Table, rank: Rank) -> dict[str, dict[str, Any]]:
    """Return counters, loss scaling and the optimizer's steps, in the manifest's form."""
    scaler = getattr(rank.optimizer.values.get("loss_scaler"), "__dict__", {})
    if "cur_iter" not in scaler:  # a static scale from the JSON, which does not change
        scaler = {}
    scaling = Table(scaler, rank.optimizer.file, "loss_scaler")
    counters = {n: model.count(n) if model.has(n) else 0 for n in _COUNTERS}
    return {
        "counters": counters,
        "loss_scaling": {name: scaling.number(name) for name in _SCALER if name in scaling},
        "optimizer": {_STEP: float(rank.steps[0])} if rank.steps else {},
    }


_MOST_JSON_BYTES = 2**26


@dataclass(frozen=True)
class Source:
    """A checkpoint's folder, which may hold a tokenizer; `engine` is DeepSpeed's folder in it."""

    path: Path
    engine: Path
    model_config: dict[str, Any]


def find_source(text: str, model: str | None = None) -> Source:
    """Return the checkpoint that `text` names: the folder of the Trainer or of DeepSpeed (its
    newest checkpoint, or FOLDER@STEP), or one checkpoint of either. `model` names the model as
    model.name does; None: the config.json beside the checkpoint.

    Raises ConfigError if there is none.
    """
    run, step = run_and_step(text)
    if not run.is_dir():
        raise ConfigError(f"{run} is not a folder")
    path, wanted = run, step
    if numbered := _by_step(run.glob("checkpoint-*")):  # the Trainer's
        path, wanted = _chosen(run, numbered, step), None
    engine = path
    if not any(path.glob(_STATES)):
        named = {file.parent for file in path.glob(f"*/{_STATES}")}
        if not named:
            raise ConfigError(f"{path} holds no checkpoint: neither {_STATES} nor a folder of such")
        latest = path / _LATEST
        tag = latest.read_text(errors="replace").strip() if latest.is_file() else ""
        newest = named if len(named) == 1 else named & {path / tag}
        is_newest = wanted is None and newest
        engine = next(iter(newest)) if is_newest else _chosen(path, _by_step(named), wanted)
    if model is not None:
        return Source(path, engine, find_model_config(model, "command line", "--model")[0])
    config = path / "config.json"
    if not config.exists():
        raise ConfigError(f"{config} does not exist: name the model, as in --model FOLDER")
    return Source(path, engine, _model_config(config))


_STATES, _LATEST = "*_optim_states.pt", "latest"


def _by_step(folders: Iterable[Path]) -> dict[int, Path]:
    """Return folders whose names end in a number by that number."""
    return {int(m[1]): path for path in folders if (m := re.search(r"(\d+)$", path.name))}


def _chosen(run: Path, numbered: dict[int, Path], step: int | None) -> Path:
    if not numbered or (step is not None and step not in numbered):
        not_there = f", not of {step}" if step is not None else ": name the folder of one"
        raise ConfigError(f"{run} has checkpoints of steps {sorted(numbered)}{not_there}")
    return numbered[max(numbered) if step is None else step]


def _model_config(path: Path) -> dict[str, Any]:
    try:
        table = Table(read_json(path, _MOST_JSON_BYTES, links=True), path)
        table.text("model_type")
    except Unusable as error:  # the user can fix it
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    return table.as_json()
