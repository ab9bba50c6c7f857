"""Tokenizes the sources of a run config in many processes, or one task's share of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.config.run_config import RunConfig
from tools.workers import ProgressLine, cores, run_workers

if TYPE_CHECKING:
    from harness.data.cache import Report
    from harness.data.shards import ShardedTokens


@dataclass(frozen=True)
class Share:
    """The part of the work that this process does."""

    workers: int = cores()
    task: int = 0
    tasks: int = 1


def tokenized(
    run: RunConfig, out: Path | None, share: Share, report: Report, *, trust_remote_code: bool
) -> Iterator[str]:
    """Tokenize each source into the cache, or into OUT.bin and OUT.idx; yield a line about each.

    Raises ConfigError, OSError and WorkerFailed.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    from tools.tokenizing.work import Work  # imports torch by way of transformers

    work = Work(run, out, report, trust_remote_code)
    for source in work.sources():
        tokens = source.tokens
        _write_shards(tokens, work.missing(source), share)
        if missing := work.missing(source):
            yield (
                f"{len(missing)} of {len(tokens.shards)} shards of {tokens.corpus.path} are left "
                "to other tasks; the last one to end merges all"
            )
        else:
            yield work.finish(source)


def _write_shards(tokens: ShardedTokens, missing: list[int], assigned: Share) -> None:
    """Tokenize a share of the missing shards."""
    share = [number for number in missing if number % assigned.tasks == assigned.task]
    if not share:
        return
    sizes = [shard.num_bytes for shard in tokens.shards]
    total = sum(sizes[number] for number in range(assigned.task, len(sizes), assigned.tasks))
    line = ProgressLine("tokenised", total, total - sum(sizes[number] for number in share))

    def watch(done: dict[int, int]) -> None:
        line.show(sum(min(count, sizes[number]) for number, count in done.items()))

    try:
        run_workers(tokens.write, share, assigned.workers, watch)
    finally:
        line.end()
