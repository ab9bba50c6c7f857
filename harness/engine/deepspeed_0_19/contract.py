"""Decides whether a DeepSpeed that is newer than those tested can be used.

The release after a tested one is tried: it runs if every name that the library replaces or calls is
still there, and is refused with the first names that are not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from importlib.metadata import version
from typing import Any

from harness.errors import ConfigError

TESTED = (0, 19)
"""The newest release that passes tests/engine/deepspeed_0_19."""
_READ = (
    "deepspeed.runtime.engine.DeepSpeedEngine.allreduce_and_copy",
    "deepspeed.runtime.pipe.engine.PipelineEngine._INSTRUCTION_MAP",
    "deepspeed.runtime.pipe.engine.PipelineEngine._exec_optimizer_step",
    "deepspeed.runtime.pipe.engine.PipelineEngine._exec_schedule",
    "deepspeed.runtime.pipe.engine.PipelineEngine.reset_activation_shape",
    "deepspeed.runtime.pipe.engine.PipelineEngine.set_dataiterator",
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._get_fp32_grad_state_partition",
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._get_param_partition_rank",
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._swappable_optimizer_subgroup",
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer._lazy_init_hp_params_optimizer_state",
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.update_lp_params",
)
"""Private names of classes that `internals.py` and `gradients.py` call."""


def require_contract(replaced: Iterable[str], say: Callable[[str], None]) -> None:
    """Say in a line that DeepSpeed is newer than those tested. `replaced`: names of patches.

    Raises ConfigError if it lacks a name that the library needs.
    """
    installed = version("deepspeed")
    if tuple(map(int, installed.split(".")[:2])) <= TESTED:
        return
    tested = ".".join(map(str, TESTED))
    names = [*(name for names in replaced for name in _static(names)), *_READ]
    if missing := [name for name in names if not _is_there(name)]:
        raise ConfigError(
            f"deepspeed {installed} has no {', '.join(missing[:3])}, which the harness needs: "
            f"install deepspeed {tested}"
        )
    say(f"deepspeed {installed} is newer than {tested}, the newest tested; all names are there")


def _static(names: str) -> Iterator[str]:
    """Yield the full names in a row of patches.py; none for those of an object that a run makes."""
    first, *others = names.replace(",", "").split()
    owner, _, _ = first.rpartition(".")
    if owner.partition(".")[0] == "deepspeed":
        yield first
        yield from (f"{owner}.{name}" for name in others)


def _is_there(name: str) -> bool:
    """Return True if a dotted name resolves to a module, a class in it, or a member of that
    class.
    """
    parts = name.split(".")
    module: Any = importlib.import_module(parts[0])
    for count in range(2, len(parts)):
        try:
            module = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            parts = parts[count - 1 :]
            break
    else:
        parts = parts[-1:]
    try:
        reduce(_attribute, parts, module)
    except AttributeError:
        return False
    return True


def _attribute(owner: Any, name: str) -> Any:
    value = getattr(owner, name.removesuffix("()"))
    return value() if name.endswith("()") else value
