"""Runs the stages of a cleaning: on this machine, or as Slurm arrays on a cluster."""

import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from copy import deepcopy
from pathlib import Path
from typing import Any

from datatrove.executor.local import LocalPipelineExecutor
from datatrove.executor.slurm import SlurmPipelineExecutor
from datatrove.utils.logging import logger

from harness.errors import ConfigError
from harness.launch.ranks import REPOSITORY
from tools.cleaning import steps
from tools.cleaning.pipeline import Stage, logs_of
from tools.cleaning.recipe import SlurmSection
from tools.slurm_queue import queued
from tools.workers import Progress, WorkerFailed, progress_bar, run_workers


class Local(LocalPipelineExecutor):
    """datatrove's local executor with forked workers that never outlive the tool."""

    def run_stage(self, stage: Stage, sizes: Sequence[int]) -> None:
        """Run the unfinished tasks. Raises WorkerFailed and OSError."""
        missing = self.get_incomplete_ranks()
        if not missing:
            return
        self.save_executor_as_json()
        before = sum(sizes) - sum(sizes[number] for number in missing)

        def work(rank: int, progress: Progress) -> None:
            own = deepcopy(self)  # steps collect the statistics of one task
            steps.read_so_far = progress
            try:
                with Path(os.devnull).open("w") as log, redirect_stderr(log):  # a file has the log
                    own._run_for_rank(rank, local_rank=1)
            except ConfigError:  # bad lines are reported later, for all tasks together
                return
            progress(sizes[rank])

        def watch(done: dict[int, int]) -> None:
            now = before + sum(min(count, sizes[rank]) for rank, count in done.items())
            bar.update(now - bar.n)

        with progress_bar(f"cleaning, {stage.name}:", sum(sizes), before) as bar:
            run_workers(work, missing, self.workers, watch)


def run_here(
    stages: Iterable[Stage], logs: Path, sizes: Sequence[int], workers: int, problems: Path
) -> None:
    """Run all stages on this machine, except tasks that an earlier start finished."""
    for number, stage in enumerate(stages, 1):
        local = Local(stage.steps, stage.tasks, workers, str(logs_of(logs, number, stage)))
        local.run_stage(stage, sizes if stage.tasks == len(sizes) else [1] * stage.tasks)
        if stage.reads_corpus:
            steps.require_no_problems(problems)
        if left := local.get_incomplete_ranks():
            raise WorkerFailed(f"{len(left)} tasks of {stage.name} did not end")


_POLL_S = 2.0
_LOST_S = 20.0
"""Seconds without queued jobs after which an unfinished stage counts as failed: files that other
machines wrote may appear late.
"""
Say = Callable[[str], None]


class Slurm(SlurmPipelineExecutor):
    """datatrove's Slurm executor; account and partition come from slurm/site.env."""

    def get_sbatch_args(self, max_array: int = 1) -> dict[str, Any]:
        """Return the directives of the script, except those that the environment sets."""
        return {
            key: value for key, value in super().get_sbatch_args(max_array).items() if value != "-"
        }

    def launch_merge_stats(self) -> None:
        """Do nothing: the report sums the tasks' statistics."""


def environment(clone: Path, folder: Path) -> str:
    """Return the command that prepares a job's shell: the site's environment, in `folder`."""
    there, here = shlex.quote(str(clone)), shlex.quote(str(folder))
    return (
        f"cd {there} || exit 2; source slurm/site.env; cd {here} || exit 2; "
        f"export PYTHONPATH={there}${{PYTHONPATH:+:$PYTHONPATH}}"
    )


def run_on_slurm(
    stages: Iterable[Stage], logs: Path, options: SlurmSection, problems: Path, say: Say
) -> None:
    """Submit the stages as dependent job arrays, unless they are already queued, and follow them.

    Raises WorkerFailed and ConfigError.
    """
    executors: list[Slurm] = []
    before: Slurm | None = None
    for number, stage in enumerate(stages, 1):
        before = Slurm(
            stage.steps,
            stage.tasks,
            time=options.time,
            partition="-",
            qos="",
            mem_per_cpu_gb=options.mem_per_cpu_gb,
            workers=options.at_once or -1,
            job_name=f"clean-{stage.name}",
            env_command=environment(REPOSITORY, Path.cwd()),
            logging_dir=str(logs_of(logs, number, stage).resolve()),
            depends=before,
            mail_user=None,
        )
        executors.append(before)
    jobs = logs / "slurm-jobs.json"
    numbers = json.loads(jobs.read_text()) if jobs.exists() else []
    if cancel_never_satisfied(queued(numbers)):
        say(f"jobs {', '.join(numbers)} are in the queue")
    else:
        logger.remove()
        try:
            executors[-1].launch_job()
        except subprocess.CalledProcessError as error:
            raise ConfigError(f"sbatch rejected the job: {error}") from error
        numbers = [
            str(executor.job_id) for executor in executors if executor.job_id not in (None, -1)
        ]
        jobs.parent.mkdir(parents=True, exist_ok=True)
        jobs.write_text(json.dumps(numbers))
        say(f"submitted {len(numbers)} arrays as jobs {', '.join(numbers)}")
    _follow(executors, numbers, problems, say)


def cancel_never_satisfied(tasks: Mapping[str, str]) -> list[str]:
    """Cancel jobs whose dependency failed: they would wait forever. Return the other tasks."""
    never = [task for task, reason in tasks.items() if reason == "DependencyNeverSatisfied"]
    if never:
        numbers = sorted({task.partition("_")[0] for task in never})
        subprocess.run(["scancel", *numbers], capture_output=True, check=False)
    return [task for task in tasks if task not in never]


def _follow(executors: Sequence[Slurm], jobs: Sequence[str], problems: Path, say: Say) -> None:
    reported, idle_since = 0, None
    while True:
        left = [len(executor.get_incomplete_ranks()) for executor in executors]
        ended = sum(not count for count in left)
        for executor in executors[reported:ended]:
            say(f"{executor.job_name}: all {executor.tasks} tasks have ended")
        reported = max(reported, ended)
        if ended == len(executors):
            return
        if cancel_never_satisfied(queued(jobs)):
            idle_since = None
        elif idle_since is None:
            idle_since = time.monotonic()
        elif time.monotonic() > idle_since + _LOST_S or any(problems.glob("*.json")):
            steps.require_no_problems(problems)
            failed = executors[ended]
            raise WorkerFailed(
                f"{left[ended]} tasks of {failed.job_name} failed: see "
                f"{failed.logging_dir.path}/logs and /slurm_logs"
            )
        time.sleep(_POLL_S)
