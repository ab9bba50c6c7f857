"""A pipeline stage as DeepSpeed's PipelineModule: one layer, with its tied weights."""

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

from harness.layout.grid import Grid

Tied = list[tuple[nn.Parameter, dist.ProcessGroup]]


@contextmanager
def printing_nothing() -> Iterator[None]:
    """Return a context that suppresses what PipelineModule prints at any log level."""
    with redirect_stdout(io.StringIO()):
        yield


class StageModule(PipelineModule):  # type: ignore[misc]  # which has no types
    """One rank's stage in the form that DeepSpeed requires: a pipeline with one layer per stage.

    `tied`: the weights of this stage that another stage holds too, with the group of both ranks.
    """

    def __init__(self, stage: nn.Module, grid: Grid, tied: Tied) -> None:
        self._tied = tied
        # Same axis order as the grid: pipe, data, model, with model innermost.
        ranks = PipeModelDataParallelTopology(
            num_pp=grid.pipeline, num_mp=grid.tensor, num_dp=grid.data
        )
        with printing_nothing():
            super().__init__([stage] * grid.pipeline, topology=ranks, partition_method="uniform")
        weight: Any
        for weight, group in tied:
            # The last stage's copy is left out of the gradient norm and of checkpoints.
            weight.ds_pipe_replicated = dist.get_rank() != dist.get_global_rank(group, 0)

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        """The ranks that hold the other slices of this stage's tensors."""
        group: dist.ProcessGroup = self._grid.get_slice_parallel_group()
        return group

    def _index_tied_modules(self) -> dict[str, Any]:
        return {}

    def get_tied_weights_and_groups(self) -> Tied:
        """Return the weights whose gradients DeepSpeed sums over the group."""
        return self._tied

    def _synchronize_tied_weights(self) -> None:
        for weight, group in self._tied:
            dist.broadcast(weight.data, dist.get_global_rank(group, 0), group=group)
