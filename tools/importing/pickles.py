"""DeepSpeed's files are pickles, and a pickle can run anything: these are opened by an allow-list.

Its few classes are replaced by plain ones of the same name here, so that DeepSpeed is not imported.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from harness.checkpoint.tensor_file import DTYPES
from harness.errors import Unusable
from harness.files.regular_file import open_regular
from harness.files.table import Table


class Plain:
    """An object of which only the attributes count."""


class Stage(int):
    """ZeroStageEnum, as the number that it is."""


ALLOWED: dict[str, type] = {
    "deepspeed.runtime.zero.config.ZeroStageEnum": Stage,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": type("LossScaler", (Plain,), {}),
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": type("DynamicScaler", (Plain,), {}),
    "deepspeed.utils.tensor_fragment.fragment_address": type("Address", (Plain,), {}),
}


def read(path: Path) -> Table:
    """The dict that torch.save wrote to `path`; its tensors stay on disk until they are used.

    Raises Unusable, before anything is unpickled, where it asks for anything else than tensors,
    plain values and ALLOWED; and where it is no such file.
    """
    try:
        open_regular(path, links=True).close()  # nobody writes to a pipe that torch would wait for
        asked = get_unsafe_globals_in_checkpoint(path)
        refused = sorted(set(asked) - set(ALLOWED))
        if refused:
            raise Unusable(
                f"{path} asks for {', '.join(refused)}, which no checkpoint needs: opening it "
                "could run anything, so it is not opened"
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
    """A flat tensor with all its elements in the file. Raises Unusable where there is none."""
    value = table.get(key)
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        table.refuse(table.path_of(key), value, "a tensor")
    if value.dtype not in DTYPES or value.device.type != "cpu":
        table.refuse(table.path_of(key), f"{value.dtype} on {value.device}", "a tensor of numbers")
    if value.nbytes > value.untyped_storage().nbytes():
        table.refuse(table.path_of(key), tuple(value.shape), "the shape of what the file holds")
    return value.detach().reshape(-1)
