"""Runs stages on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr
from copy import deepcopy
from pathlib import Path

from datatrove.executor.local import LocalPipelineExecutor

from harness.errors import ConfigError
from tools.cleaning import reading
from tools.cleaning.pipeline import Stage, logs_of
from tools.workers import Progress, ProgressLine, WorkerFailed, run_workers


class Local(LocalPipelineExecutor):
    """datatrove's local executor on forked workers, of which none outlives the tool."""

    def run_stage(self, stage: Stage, sizes: Sequence[int]) -> None:
        """Run the tasks that are missing. Raises WorkerFailed, and OSError."""
        missing = self.get_incomplete_ranks()
        if not missing:
            return
        self.save_executor_as_json()
        line = ProgressLine(
            f"cleaning, {stage.name}:", sum(sizes), sum(sizes) - sum(sizes[n] for n in missing)
        )

        def work(rank: int, progress: Progress) -> None:
            own = deepcopy(self)  # steps collect the statistics of one task
            reading.read_so_far = progress
            try:
                with Path(os.devnull).open("w") as log, redirect_stderr(log):  # it has a file, too
                    own._run_for_rank(rank, local_rank=1)
            except ConfigError:  # bad lines: all tasks' are reported together
                return
            progress(sizes[rank])

        def watch(done: dict[int, int]) -> None:
            line.show(sum(min(count, sizes[rank]) for rank, count in done.items()))

        try:
            run_workers(work, missing, self.workers, watch)
        finally:
            line.end()


def run_here(
    stages: Iterable[Stage], logs: Path, sizes: Sequence[int], workers: int, problems: Path
) -> None:
    """Run all stages on this machine, without what earlier starts have finished."""
    for number, stage in enumerate(stages, 1):
        local = Local(stage.steps, stage.tasks, workers, str(logs_of(logs, number, stage)))
        local.run_stage(stage, sizes if stage.tasks == len(sizes) else [1] * stage.tasks)
        if stage.reads_corpus:
            reading.require_no_problems(problems)
        if left := local.get_incomplete_ranks():
            raise WorkerFailed(f"{len(left)} tasks of {stage.name} did not end")
