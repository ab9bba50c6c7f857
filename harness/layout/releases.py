"""Differences between supported releases of transformers and torch that a plan depends on.

harness/models/recurrent_state.py holds one that a model depends on. When the lower bound in
pyproject.toml passes a release that is named here, its entry can go. Standard library alone.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

# CodeGen and GPT-J compute the heads that they find, and call torch's attention, since 5.24: the
# plans of plans.json do not hold for what they were before.
_REWRITTEN = {"codegen": (5, 24), "gptj": (5, 24)}


def is_older(release: tuple[int, int], package: str = "transformers") -> bool:
    """Return True if the installed package is older than a release; False if there is none."""
    return _installed(package) < release


def was_rewritten(model_type: str) -> bool:
    """Return whether the installed transformers is older than a decoder's rows of plans.json."""
    return is_older(_REWRITTEN.get(model_type, (0, 0)))


@cache
def _installed(package: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, version(package).split(".")[:2]))
    except PackageNotFoundError:
        return (10**9,)
