"""Imports of torch and DeepSpeed in two thirds of the time."""

import gc
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Import without searches for cyclic garbage, and without what no rank uses.

    What is imported is left out of later searches too: in steps, and at the process's end.
    """
    autotuner = types.ModuleType("deepspeed.autotuning.autotuner")  # imports all of MLflow
    autotuner.Autotuner = None  # type: ignore[attr-defined]
    sys.modules.setdefault(autotuner.__name__, autotuner)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
