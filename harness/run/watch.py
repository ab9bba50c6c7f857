"""What a run does when a step goes wrong: leave it out, go back, or stop with a diagnosis."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist

from harness.checkpoint.load import Checkpoint, newest_usable
from harness.data.batches import Batch
from harness.errors import ExitCode, RunStopped
from harness.guard.patience import Patience
from harness.guard.replicas import ReplicasDiffer, outliers
from harness.guard.spikes import Spike, SpikeDetector
from harness.run.resumption import load_into
from harness.run.saving import finish_save
from harness.run.start import Run

_LOWER = "resume from a checkpoint before it, in a new run.dir, with a lower optim.lr"


class RollBack(Exception):
    """Leaves the loop for the newest checkpoint; the step under way has changed nothing."""


class Watch:
    """Judges every step of a run.

    What it knows is in every checkpoint: a run that goes on from one decides as the run did that
    made it.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.guard = run.plan.run.guard
        self.detector = SpikeDetector(self.guard.spike_sigma, self.guard.spike_window)
        self.bad_steps = 0  # skipped ones, in a row
        self.rollbacks = 0
        self._spike: Spike | None = None  # in the step under way
        self._targets = 0  # in the step under way, over all ranks
        self._diagnosis = ""  # of the last skipped step
        self._found = math.nan, math.nan  # loss and norm in that step, where they were read
        self._reads = run.next_step
        self.patience = Patience(run.plan.run.eval.patience, run.plan.run.eval.better_by)
        self._recall(run.known)

    def train_batch(self, batches: list[Batch], targets: int, lr: float) -> Any:
        """Take one step, or leave a spike out; returns the engine's StepResult.

        Raises RollBack where the run is to go back instead.
        """
        policy, self._spike, self._targets = self.guard.spikes, None, targets
        self._reads = self.run.next_step
        judge = None if policy == "log" else self._is_spike
        try:
            result = self.run.engine.train_batch(batches, targets, lr, judge)
        except RunStopped as stop:  # fp16's loss scale is at its minimum
            if policy != "rollback":
                raise
            raise RollBack(stop.message) from stop
        if self._spike is not None and policy == "rollback":
            raise RollBack(f"a spike of {self._spike.of}")
        return result

    def step_done(self, loss_share: torch.Tensor, grad_norm: float | torch.Tensor) -> None:
        """After every step: one that was not applied is an event, and is counted.

        The host waits for the loss of such a step alone. One without a target says nothing of the
        weights, neither good nor bad: it is not counted.
        """
        run = self.run
        if not self._targets:
            reads = [self._reads.first_sample, self._reads.first_sample + self._reads.global_batch]
            reason = "none of its samples has a target token"
            run.event("skipped_step", step=run.state.step, reason=reason, samples=reads, loss=None)
            return
        if run.engine.step_applied:
            self.bad_steps = 0
            return
        loss = float(run.engine.sum_over_ranks(loss_share.detach().clone()))
        reason = "the gradients are not finite"
        scaled = run.plan.precision == "fp16" and not run.plan.deepspeed["fp16"].get("loss_scale")
        if self._spike is not None:
            reason = f"a spike of {self._spike.of}"
        elif not math.isfinite(loss):
            reason = "the loss is not finite"
        elif scaled:
            reason = "fp16 overflowed: the loss scale falls"
        found = {"loss": loss, "grad_norm": float(grad_norm), "loss_scale": run.engine.loss_scale}
        run.event("skipped_step", step=run.state.step, reason=reason, **found)
        if self._spike is not None or not scaled:  # else the scale reaches its minimum, or recovers
            self.bad_steps += 1
        self._diagnosis = f"{reason} (loss {loss:.4g}, norm {found['grad_norm']:.4g})"

    def logged(self, line: dict[str, Any]) -> None:
        """With every metrics line: look for spikes under guard.spikes=log.

        Raises RunStopped (diverged) where the held-out loss says that the weights are lost.
        """
        if self.guard.spikes == "log" and self.run.engine.step_applied:
            self._look(self.run.state.step, line["loss"], line["grad_norm"])
        self.evaluated(line)
        if not math.isfinite(line.get("eval_loss", 0.0)):
            raise RunStopped(ExitCode.DIVERGED, f"the held-out loss is not finite: {_LOWER}")

    def stop_if_diverged(self) -> None:
        """Raises RunStopped (diverged) after guard.max_bad_steps skipped steps in a row."""
        run, count = self.run, self.bad_steps
        if count >= self.guard.max_bad_steps:
            raise RunStopped(
                ExitCode.DIVERGED,
                f"{count} steps in a row were skipped (guard.max_bad_steps), the last because "
                f"{self._diagnosis}. Weights are those of step {run.state.step - count}. What it "
                f"read: tools/show_batch.py {run.folder.path} --step {run.state.step}; {_LOWER}",
            )

    def evaluated(self, line: dict[str, Any]) -> None:
        """With every evaluation: whether the held-out loss still falls."""
        if "eval_loss" in line:
            self.patience.see(line["eval_loss"], self.run.state.step)

    def ends_early(self) -> bool:
        """Whether the held-out loss has stopped falling (eval.patience); an event, if so."""
        run, seen = self.run, self.patience
        if not seen.is_over or run.state.step == run.total_steps:
            return False
        best = f"the held-out loss was best at step {seen.best_step}, {seen.best:.4f}"
        run.event("ended_early", step=run.state.step, best_step=seen.best_step, best=seen.best)
        run.progress.say(f"ends at step {run.state.step}, early (eval.patience): {best}")
        run.total_steps = run.state.step
        return True

    def known(self) -> dict[str, Any]:
        """What a run needs that goes on from a checkpoint made now."""
        counts = {"bad_steps": self.bad_steps, "rollbacks": self.rollbacks}
        return {**counts, "seen": self.detector.state(), "patience": self.patience.state()}

    def roll_back(self, why: RollBack) -> None:
        """Go back to the newest checkpoint, and on with the samples after the step that failed.

        Raises RunStopped (diverged) where there is none, or after guard.max_rollbacks.
        """
        run, rollbacks = self.run, self.rollbacks
        step, end = run.state.step + 1, self._reads.first_sample + self._reads.global_batch
        loss, norm = self._found
        found = f"step {step}: {why} (loss {loss:.4g}, norm {norm:.4g})"
        checkpoint, why_not = None, f"{rollbacks} rollbacks did not help (guard.max_rollbacks)"
        if rollbacks < self.guard.max_rollbacks:
            checkpoint, why_not = (
                reload(run),
                "there is no checkpoint to go back to: set save.every",
            )
        if checkpoint is None:
            raise RunStopped(ExitCode.DIVERGED, f"{found}, and {why_not}; {_LOWER}")
        state = checkpoint.state
        tokens = state.tokens + (end - state.samples) * run.plan.run.data.seq_len
        run.state = replace(state, samples=end, tokens=tokens)
        run.held_out_nats = checkpoint.manifest.held_out_loss
        self._recall(checkpoint.manifest.watch)
        self.rollbacks = rollbacks + 1
        past = [state.samples, end]
        back = {"from_step": step, "to_step": state.step, "samples_skipped": past}
        run.event("rollback", **back, why=str(why), loss=loss, grad_norm=norm)
        run.progress.say(f"{found}: back to step {state.step}, past samples {past}")

    def check_replicas(self, saves: bool) -> None:
        """Compare what all data ranks hold in common where that is due, and before every save.

        Raises ReplicasDiffer, which names the ranks and what differs.
        """
        run, every = self.run, self.guard.replicas_every
        if not every or run.plan.grid.data == 1 or not (saves or run.state.step % every == 0):
            return
        held = list(run.engine.replicated())
        everyone: list[Any] = [None] * run.plan.world.world_size
        dist.all_gather_object(everyone, outliers(held, run.engine.data_group))
        found = {name: ranks for found in everyone for name, ranks in found.items()}
        if not found:
            run.event("replicas_equal", step=run.state.step, tensors=len(held))
            return
        run.event("replicas_differ", step=run.state.step, ranks_by_parameter=found)
        finish_save(run)  # they were equal when it began
        newest, (name, ranks) = run.saver.store.all()[-1:], next(iter(found.items()))
        who = f"rank {', '.join(map(str, ranks))}"
        if len(ranks) == run.plan.grid.data:
            who += " (among which there is no majority)"
        raise ReplicasDiffer(
            f"after step {run.state.step} data ranks differ in {len(found)} weights that should be "
            f"the same, {name} on {who}: faulty memory or links there. "
            + (
                f"{newest[0].name} predates it: start again from there"
                if newest
                else "No checkpoint predates it: begin the run again"
            )
        )

    def _is_spike(self, loss_share: torch.Tensor, norm: torch.Tensor) -> bool:
        """Whether all ranks leave this step out: they judge the same two numbers."""
        run = self.run
        both = torch.stack([loss_share.double(), norm.double() / run.plan.world.world_size])
        self._found = loss, norm = run.engine.sum_over_ranks(both).tolist()
        self._look(run.state.step + 1, loss, norm)
        return self._spike is not None

    def _look(self, step: int, loss: float, norm: float) -> None:
        self._spike = self.detector.see(loss, norm)
        if self._spike is not None:
            first, count = self._reads.first_sample, self._reads.global_batch
            samples = [first, first + count]
            found = {"loss": loss, "grad_norm": norm, "samples": samples, **asdict(self._spike)}
            self.run.event("spike", step=step, policy=self.guard.spikes, **found)

    def _recall(self, known: dict[str, Any]) -> None:
        """Know what was known when the run's state was saved."""
        self.detector.restore(known.get("seen", {}))
        self.patience.restore(known.get("patience", {}))
        self.bad_steps = known.get("bad_steps", 0)
        self.rollbacks = known.get("rollbacks", 0)


def reload(run: Run) -> Checkpoint | None:
    """Load the newest usable checkpoint into the running engine; None where there is none."""
    finish_save(run)
    run.pulse("load", run.state.step)
    checkpoint, _ = newest_usable(run.saver.store.folder)
    if checkpoint is not None:
        load_into(run.engine, checkpoint)
    return checkpoint
