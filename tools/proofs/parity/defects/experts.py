"""Defects of expert parallelism."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from harness.engine import expert
from harness.layout.world import World


@contextlib.contextmanager
def averaged_over_the_holders(world: World) -> Iterator[None]:
    """Gradients of experts are added up over the ranks that have the other ones."""
    import deepspeed
    from deepspeed.utils import groups

    def initialize(**kwargs: Any) -> Any:
        engine, *rest = original(**kwargs)
        engine.optimizer.expert_dp_process_group = {**groups._EXPERT_PARALLEL_GROUP}
        return engine, *rest

    original = deepspeed.initialize
    with mock.patch.object(deepspeed, "initialize", initialize):
        yield


@contextlib.contextmanager
def norm_of_own_experts(world: World) -> Iterator[None]:
    """The norm that clips has the squares of a rank's own experts alone."""
    from deepspeed.runtime.zero import stage3

    with mock.patch.object(stage3.pg_utils, "is_parallel", return_value=False):
        yield


def norm_of_one_tensor_rank(world: World) -> contextlib.AbstractContextManager[Any]:
    """The norm that clips has the squares of one tensor rank's part of every expert."""
    announce = expert.announce_experts

    def without_parts(model: Any, stage: int, experts: Any, replicas: Any, parts: Any) -> None:
        announce(model, stage, experts, replicas, experts)

    return mock.patch.object(expert, "announce_experts", without_parts)


def token_dropped(world: World) -> contextlib.AbstractContextManager[Any]:
    """Of every micro-batch, the first token does without its first expert."""

    def drop(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        kept = torch.ones_like(rows[:, :1])
        kept[0] = 0
        return reordered(rows, order) * kept

    reordered = expert.reordered
    return mock.patch.object(expert, "reordered", drop)


def rows_as_they_came(world: World) -> contextlib.AbstractContextManager[Any]:
    """Outputs are not put back in the order of the tokens."""
    return mock.patch.object(expert, "reordered", lambda rows, order: rows)
