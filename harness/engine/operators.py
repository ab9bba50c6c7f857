"""Checks that DeepSpeed's compiled operators can be built."""

from __future__ import annotations

from deepspeed.accelerator import get_accelerator

from harness.errors import ConfigError


def problem_of(builder: str) -> str | None:
    """Load the operator of DeepSpeed's `builder`; return None, or why this rank cannot."""
    try:
        get_accelerator().create_op_builder(builder).load(verbose=False)
    except (ConfigError, RuntimeError) as error:  # RuntimeError: tools are missing
        return str(error)
    return None
