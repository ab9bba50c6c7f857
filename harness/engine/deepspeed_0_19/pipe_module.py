"""A pipeline stage as DeepSpeed's PipelineModule: one layer, with its tied weights."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import nn

Tied = list[tuple[nn.Parameter, dist.ProcessGroup]]


@contextmanager
def printing_nothing() -> Iterator[None]:
    """Stop what PipelineModule prints whatever the log level."""
    with redirect_stdout(io.StringIO()):
        yield


class StageModule(PipelineModule):  # type: ignore[misc]  # which has no types
    """One rank's stage, as DeepSpeed wants it: a pipeline with one layer per stage.

    `tied`: this stage's weights of which another stage holds a copy, and the group of both.
    """

    def __init__(self, stage: nn.Module, stages: int, tied: Tied) -> None:
        self._tied = tied
        with printing_nothing():
            super().__init__([stage] * stages, num_stages=stages, partition_method="uniform")
        weight: Any
        for weight, group in tied:
            # The copy of the last stage counts neither in the gradient norm nor in checkpoints.
            weight.ds_pipe_replicated = dist.get_rank() != dist.get_global_rank(group, 0)

    def _index_tied_modules(self) -> dict[str, Any]:
        return {}

    def get_tied_weights_and_groups(self) -> Tied:
        """Whose gradients DeepSpeed sums over the group."""
        return self._tied

    def _synchronize_tied_weights(self) -> None:
        for weight, group in self._tied:
            dist.broadcast(weight.data, dist.get_global_rank(group, 0), group=group)
