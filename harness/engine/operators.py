"""DeepSpeed's compiled operators: whether they can be built here, and what runs without them."""

from __future__ import annotations

from deepspeed.accelerator import get_accelerator

from harness.errors import ConfigError


def problem_of(builder: str) -> str | None:
    """Load the operator of DeepSpeed's `builder`; None, or why this rank cannot."""
    try:
        get_accelerator().create_op_builder(builder).load(verbose=False)
    except (ConfigError, RuntimeError) as error:  # DeepSpeed's own for what it lacks
        return str(error)
    return None
