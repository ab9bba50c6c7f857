"""Differences between supported releases of transformers and torch that a plan depends on.

harness/models/recurrent_state.py has one that a model depends on. Remove an entry once the lower
bound in pyproject.toml has reached its release. Standard library only.
"""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

# Since 5.24, CodeGen and GPT-J compute as many heads as their weights have, and call torch's
# attention. Their plans in plans.json do not apply to earlier releases.
_REWRITTEN = {"codegen": (5, 24), "gptj": (5, 24)}


def is_older(release: tuple[int, int], package: str = "transformers") -> bool:
    """Return True if the package is older than a release; False if it is not installed."""
    return _installed(package) < release


def was_rewritten(model_type: str) -> bool:
    """Return True if the installed transformers is older than a decoder's entries in plans.json."""
    return is_older(_REWRITTEN.get(model_type, (0, 0)))


@cache
def _installed(package: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, version(package).split(".")[:2]))
    except PackageNotFoundError:
        return (10**9,)
