"""Defects in what is read, and in how its losses are added up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from harness.data.batch import Batch
from harness.engine import build
from harness.layout.world import World
from harness.models import chunked_loss
from tests.gates.cells import GLOBAL_BATCH
from tests.gates.models import SEQ_LEN
from tests.gates.parity.defects.seams import Planted, batches_changed, losses_changed, wrapped
from tests.gates.parity.samples import global_batch, targets


def sample_dropped(world: World) -> contextlib.AbstractContextManager[None]:
    """The last rank trains its first sample's micro-batch without that sample."""

    def drop(batches: list[Batch]) -> None:
        if world.rank == world.world_size - 1:
            batches[0].labels[-1] = -100

    return batches_changed(drop)


def micro_batch_dropped(world: World) -> contextlib.AbstractContextManager[None]:
    """The last micro-batch of a step adds nothing."""
    return batches_changed(lambda batches: batches[-1].labels.fill_(-100))


def prompts_trained(world: World) -> contextlib.AbstractContextManager[None]:
    """Tokens that carry no loss carry one."""

    def change(batches: list[Batch]) -> None:
        for batch in batches:
            batch.labels[:, :-1] = batch.input_ids[:, 1:]

    return batches_changed(change)


def labels_unshifted(world: World) -> contextlib.AbstractContextManager[None]:
    """Every token is its own target."""

    def change(batches: list[Batch]) -> None:
        for batch in batches:
            torch.where(batch.labels == -100, batch.labels, batch.input_ids, out=batch.labels)

    return batches_changed(change)


def positions_go_on(world: World) -> contextlib.AbstractContextManager[None]:
    """Positions do not begin anew where a document does, so that none is told from the next."""

    def change(batches: list[Batch]) -> None:
        for batch in batches:
            assert batch.position_ids is not None
            batch.position_ids[:] = torch.arange(SEQ_LEN)

    return batches_changed(change)


@contextlib.contextmanager
def samples_of_rank_0(world: World) -> Iterator[None]:
    """Every rank reads what the first one reads."""
    from harness.data import batches

    def share(first: int, batch: int, micro: int, data_rank: int, data_ranks: int) -> Any:
        return original(first, batch, micro, 0, data_ranks)

    original = batches.share_of_rank
    with mock.patch.object(batches, "share_of_rank", share):
        yield


def mean_of_means(world: World) -> contextlib.AbstractContextManager[None]:
    """Micro-batches count equally, however many targets they have."""
    total = targets(global_batch(0))  # the same in every step

    def change(loss: torch.Tensor, balancing: torch.Tensor | None, labels: torch.Tensor) -> Any:
        share = total * len(labels) / GLOBAL_BATCH
        return loss * (share / (labels != -100).sum().clamp(min=1)), balancing

    return losses_changed(change)


def balance_added(world: World) -> contextlib.AbstractContextManager[None]:
    """The balancing losses of micro-batches are added up, where they are to be averaged."""
    return losses_changed(lambda loss, balancing, _: (loss, 4 * balancing))


def evaluation_with(change: Callable[[Any, list[Batch], Any], torch.Tensor]) -> Planted:
    """Change what an engine evaluates, or what it says of it."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, batches, *_: change(self, batches, original)

    return lambda world: wrapped("eval_batch", wrap)


def batch_means(engine: Any, batches: list[Batch], evaluate: Any) -> torch.Tensor:
    """Each evaluated micro-batch's mean loss counts equally, however many targets it has."""
    sums = torch.stack([evaluate(engine, [batch]) for batch in batches])
    return torch.stack([(sums[:, 0] / sums[:, 1].clamp(min=1)).sum(), (sums[:, 1] > 0).sum()])


def last_chunk_dropped(world: World) -> contextlib.AbstractContextManager[Any]:
    """The last chunk takes no part in the loss, and its rows of the head have no gradient."""
    columns = chunked_loss._How.columns

    def without_last(self: Any, vocab_size: int) -> Iterator[slice]:
        return iter([*columns(self, vocab_size)][:-1])

    return mock.patch.object(chunked_loss._How, "columns", without_last)


def summand_overwritten(world: World) -> contextlib.AbstractContextManager[Any]:
    """The hidden states' gradient is that of the last chunk, not the sum over all."""

    def overwrite(total: torch.Tensor, slope: torch.Tensor, weight: torch.Tensor) -> None:
        total.copy_(slope @ weight)

    return mock.patch.object(chunked_loss, "_add_summand", overwrite)


def logits_as_the_head_gives_them(world: World) -> contextlib.AbstractContextManager[Any]:
    """Logits of chunks are neither capped nor scaled."""
    return mock.patch.object(build, "operations_on_logits", return_value=())
