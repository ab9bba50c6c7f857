"""Checkpoints of DeepSpeed's own format for import_checkpoint.py: pickles."""

from __future__ import annotations

import io
import json
import pickle
import random
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.engine.small import MODEL
from tests.fuzz.case import Case, Place
from tests.fuzz.files import replace_file, spoil_file
from tests.fuzz.trees import slots, spoil, spoil_text
from tests.fuzz.values import hostile, to_json

_OPTIM = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
_FRAGMENT = "deepspeed.utils.tensor_fragment fragment_address"


class Global:
    """Pickled as the global of that name, called with those arguments."""

    def __init__(self, name: str, *arguments: Any) -> None:
        self.module, _, self.name = name.partition(" ")
        self.arguments = arguments


class _State:
    """Pickled as an object of that class with those attributes."""

    def __init__(self, name: str, **attributes: Any) -> None:
        self.cls = Global(name)
        self.attributes = attributes


class _Pickler(pickle._Pickler):  # type: ignore[name-defined,misc]
    """Writes globals by name, without importing them."""

    write: Callable[[bytes], None]

    def save(self, value: Any, save_persistent_id: bool = True) -> None:
        if isinstance(value, _State):
            self._write_global(value.cls)
            self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
            self.save(value.attributes)
            self.write(pickle.BUILD)
        elif isinstance(value, Global):
            self._write_global(value)
            self.save(value.arguments)
            self.write(pickle.REDUCE)
        else:
            super().save(value, save_persistent_id)

    def _write_global(self, value: Global) -> None:
        self.write(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())


def _dump(value: Any, file: Any, protocol: int) -> None:
    _Pickler(file, protocol).dump(value)


_AS_PICKLE = types.SimpleNamespace(Pickler=_Pickler, dump=_dump, __name__="pickle")


def save(value: Any, path: Path, **options: Any) -> None:
    """As torch.save, with globals by name."""
    torch.save(value, path, pickle_module=_AS_PICKLE, pickle_protocol=2, **options)


def make(draw: random.Random, place: Place, valid: bool) -> Case:
    """A checkpoint of ZeRO 1, 2 or 3 as the Trainer left it."""
    stage = draw.choice((1, 2, 3))
    optim, model = _states(stage)
    root, engine, about = _folders(place)
    note = "valid"
    options: dict[str, Any] = {}
    after: Callable[[], str] | None = None
    if not valid:
        way = draw.randrange(8)
        target = draw.choice((optim, model))
        if way < 2:
            note = spoil(draw, target)
        elif way < 5:
            note = _planted(draw, place, target)
            options = {"_use_new_zipfile_serialization": draw.randrange(3) > 0}
        else:
            after = lambda: _spoiled_files(draw, place, engine, about)  # noqa: E731
    name = _OPTIM if stage == 3 else f"bf16_{_OPTIM}"
    prefix = "zero_pp_rank_0_" if stage == 3 else ""
    try:
        save(optim, engine / name, **options)
        save(model, engine / f"{prefix}mp_rank_00_model_states.pt", **options)
    except (RecursionError, RuntimeError, TypeError, ValueError, OverflowError) as error:
        note += f" (not pickled: {type(error).__name__})"
    if after is not None:
        note = after()
    words = [str(root), "--out", str(place.folder / "new")]
    return Case(words, f"ZeRO {stage}: {note}", main="tools.import_checkpoint", valid=valid)


def _states(stage: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """One rank's optimizer with two parameters, and the model's."""
    moments = {"step": torch.tensor(2.0), "exp_avg": torch.ones(10), "exp_avg_sq": torch.ones(10)}
    flat = torch.arange(10.0)
    if stage == 3:
        optimizer: dict[str, Any] = {
            "zero_stage": 3,
            "partition_count": 1,
            "fp32_flat_groups": [flat],
            "optimizer_state_dict": {"state": {0: moments}, "param_groups": [{"lr": 0.1}]},
        }
    else:
        places = {
            "w": _State(_FRAGMENT, numel=6, start=0),
            "b": _State(_FRAGMENT, numel=4, start=6),
        }
        optimizer = {
            "zero_stage": stage,
            "partition_count": [1],
            "single_partition_of_fp32_groups": [flat],
            "base_optimizer_state": {"state": {0: moments}, "param_groups": [{"lr": 0.1}]},
            "param_slice_mappings": [places],
            "loss_scaler": _State(
                "deepspeed.runtime.fp16.loss_scaler DynamicLossScaler",
                cur_scale=65536.0, cur_iter=3, last_overflow_iter=-1, cur_hysteresis=2,
            ),
        }  # fmt: skip
    model = {
        "param_shapes": [{"w": torch.Size([2, 3]), "b": torch.Size([4])}],
        "buffer_names": ["c"],
        "module": {"c": torch.ones(2)},
        "global_steps": 2,
        "global_samples": 16,
        "skipped_steps": 0,
    }
    ds_config = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    return {"optimizer_state_dict": optimizer, "ds_config": ds_config}, model


def _folders(place: Place) -> tuple[Path, Path, list[Path]]:
    """Return the folder to name, that of the pickles, and the JSON files beside them."""
    root = place.folder / "output"
    engine = root / "checkpoint-2" / "global_step2"
    engine.mkdir(parents=True)
    config = root / "checkpoint-2" / "config.json"
    config.write_text(json.dumps(MODEL))
    return root, engine, [config]


def _planted(draw: random.Random, place: Place, tree: dict[str, Any]) -> str:
    """A call that would create the marker, somewhere in the tree."""
    target = str(place.marker)
    code = f"import os; os.mkdir({target!r})"
    payloads = (
        Global("posix mkdir", target),
        Global("os mkdir", target),
        Global("posix system", f"touch {target}"),
        Global("nt system", f"touch {target}"),
        Global("builtins exec", code),
        Global("__builtin__ exec", code),
        Global("builtins eval", f"__import__('os').mkdir({target!r})"),
        Global("subprocess Popen", ["touch", target]),
        Global("subprocess check_output", ["touch", target]),
        Global("runpy _run_code", code, {}),
        Global("pathlib Path.touch", target),
        Global("builtins open", target, "w"),
        Global("shutil copyfile", "/etc/hostname", target),
        Global("torch.serialization load", target),
        Global("torch.hub load", target),
        Global("torch._dynamo.guards eval", code),
        Global("operator attrgetter", "system"),
        Global("functools partial", Global("posix mkdir", target)),
        Global("numpy.core.multiarray _reconstruct", Global("posix mkdir", target)),
        Global("collections OrderedDict", Global("posix mkdir", target)),
        Global("torch._utils _rebuild_tensor_v2", Global("posix mkdir", target)),
        Global("deepspeed.utils.tensor_fragment fragment_address", Global("posix mkdir", target)),
        Global("deepspeed.runtime.zero.config ZeroStageEnum", Global("builtins exec", code)),
        _State("deepspeed.runtime.fp16.loss_scaler LossScaler", a=Global("posix mkdir", target)),
        _State("deepspeed.runtime.fp16.loss_scaler LossScaler.__init__", a=1),
        Global("deepspeed.runtime.zero.config ZeroStageEnum", "x"),
        Global("torch Tensor"),
        Global("torch device", "nowhere"),
        Global("torch.nn.parameter Parameter"),
        Global("collections OrderedDict"),
    )
    payload = draw.choice(payloads)
    holder, key = draw.choice(slots(tree))
    holder[key] = payload
    if isinstance(payload, Global):
        told = f"{payload.module}.{payload.name} at {key!r}"
    else:
        told = f"{payload.cls.module}.{payload.cls.name} at {key!r}"
    return f"asks for {told}"


def _spoiled_files(draw: random.Random, place: Place, engine: Path, about: list[Path]) -> str:
    files = sorted(engine.iterdir())
    path, way = draw.choice(files), draw.randrange(8)
    if way == 0:
        return spoil_file(draw, path)
    if way == 1:
        return f"{path.name}: {replace_file(draw, path)}"
    if way == 2:  # of all files, the tables that are read beside the pickles
        path = draw.choice(about)
        data, told = spoil_text(draw, path.read_text())
        path.write_bytes(data)
        return f"{path.name}: {told}"
    if way == 3:
        path = draw.choice(about)
        tree = json.loads(path.read_text())
        told = spoil(draw, tree)
        path.write_text(to_json(tree), encoding="utf-8", errors="surrogatepass")
        return f"{path.name}: {told}"
    if way == 4:
        save(hostile(draw), path)
        return f"{path.name} holds no dict of its make-up"
    if way == 5:
        path.rename(
            path.with_name(
                path.name.replace("rank_0", draw.choice(("rank_1", "rank_x", "rank_0_0")))
            )
        )
        return f"{path.name} renamed"
    return _another_archive(draw, place, path)


def _another_archive(draw: random.Random, place: Place, path: Path) -> str:
    """The same zip file with a member doubled, missing or replaced."""
    payload = io.BytesIO()
    pickler = _Pickler(payload, 2)
    pickler.dump({"optimizer_state_dict": Global("posix mkdir", str(place.marker))})
    with zipfile.ZipFile(path) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    told = draw.choice(("a second data.pkl", "another data.pkl", "raw", "no data", "compressed"))
    if told == "raw":
        path.write_bytes(payload.getvalue())
        return f"{path.name}: a pickle, no archive"
    table = next(name for name, _ in members if name.endswith("data.pkl"))
    method = zipfile.ZIP_DEFLATED if told == "compressed" else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members:
            if told == "no data" and "/data/" in name:
                continue
            is_replaced = told == "another data.pkl" and name == table
            archive.writestr(name, payload.getvalue() if is_replaced else data)
        if told == "a second data.pkl":
            place_of = draw.choice((table, "x/data.pkl", "data.pkl"))
            archive.writestr(place_of, payload.getvalue())
    return f"{path.name}: {told}"
