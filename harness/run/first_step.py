"""Checks and notes around the first step that a process takes."""

from __future__ import annotations

from harness.engine.api import StepResult
from harness.run.noting import note_what_runs
from harness.run.run import Run
from harness.run.verify import check_norm, undivided_start
from harness.steps import Step


def before_first_step(run: Run) -> None:
    """Compare the loss of a divided model with the undivided one's. Collective."""
    run.first_step = run.state.step + 1
    run.undivided = undivided_start(run)


def after_first_step(run: Run, step: Step, result: StepResult) -> None:
    """Note the classes that ran, and compare the gradient norm of a divided model. Collective."""
    if step.number != run.first_step:
        return
    note_what_runs(run)
    if run.undivided is not None:
        check_norm(run, run.undivided, result.grad_norm)
