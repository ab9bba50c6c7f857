"""Saves a run's checkpoints when they are due."""

from __future__ import annotations

from harness.errors import ExitCode
from harness.guard.judge import Verdict
from harness.run.kept_sample import keep_sample
from harness.run.replicas import check_replicas
from harness.run.run import Run, is_due
from harness.run.saving import finish_save, save


def save_if_due(run: Run, verdict: Verdict) -> None:
    """Save if a save is due or the run ends; never before a rollback or after a divergence.

    Collective. Raises RunStopped (cannot save), and ReplicasDiffer before a save.
    """
    if verdict.kind == "roll back" or verdict.code == ExitCode.DIVERGED:
        return
    if verdict.is_written:
        finish_save(run)
    ends = verdict.kind != "go on" or not run.steps.are_left
    saves = ends or is_due(run.state.step, run.plan.config.save.every)
    check_replicas(run, saves)
    if saves:
        save(run, background=run.plan.config.save.async_ and not ends)
        keep_sample(run)
