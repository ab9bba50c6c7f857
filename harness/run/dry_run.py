"""The dry run: the plan, and the first records of its data as the run itself would read them."""

import json
import os
import sys
from dataclasses import dataclass
from typing import Any

from harness.data.glance import glances
from harness.data.spec import DataSpec
from harness.errors import ExitCode, NoCheckpoint
from harness.estimate.fit import shortages_here
from harness.plan.batches import steps_of
from harness.plan.data import missing_here
from harness.plan.duration import step_time
from harness.plan.machine import short_of_disk, swap_problems
from harness.plan.make import takes, with_facts
from harness.plan.plan import Counts, Facts, Plan
from harness.plan.text import row, summary, verdict
from harness.run.resumption import foreseen
from harness.runfolder import saved_steps
from harness.terminal import Parts, marked

_MOST_CHARACTERS = 600  # of a part of an example


def without_torch() -> None:
    """Keep transformers from importing torch, which takes seconds and which tokenizers do not need.
    Only for a process that ends with the dry run.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that it is missing
        sys.modules["torch"] = None  # type: ignore[assignment]


@dataclass(frozen=True)
class DryRun:
    """A plan, with what this machine shows of its data, its run folder and its own room."""

    plan: Plan
    counts: Counts | None
    elsewhere: bool
    """True if the plan is for other machines."""
    data: list[str]
    notes: list[str]
    run_dir: list[str]
    lacking: list[str]
    """What these machines lack, so that the run would end; of other machines: memory."""
    other: list[str]
    """What they may lack, too."""
    examples: dict[str, Parts]
    """The first examples by heading, if asked for: the parts of each, and if they are learned."""

    @property
    def fits(self) -> bool | None:
        """False if the run would end for lack of room; None if that is unknown, or tight."""
        estimate = self.plan.estimate
        if self.lacking or estimate is None:
            return False if self.lacking else None
        return None if self.elsewhere and estimate.verdict != "fits" else True

    @property
    def code(self) -> ExitCode:
        """The exit code of the command."""
        is_short = self.fits is False and not self.plan.config.plan.force
        return ExitCode.DOES_NOT_FIT if is_short else ExitCode.DONE

    @property
    def verdict(self) -> str:
        """Whether the machines can hold the run, and what would help."""
        if self.elsewhere:
            return "; ".join([*(self.lacking or [verdict(self.plan)]), *self.other])
        return "; ".join([*self.lacking, *self.other]) or "can hold it"

    def text(self, *, color: bool = False) -> str:
        """Return the summary, the first examples and the resolved JSON."""
        plan = self.plan
        rows = {"data": self.data, "note": self.notes, "run.dir": self.run_dir}
        rows["the cluster" if self.elsewhere else "this machine"] = [self.verdict]
        lines = [row(label, line) for label, texts in rows.items() for line in texts]
        shown = []
        if self.examples:
            shown = ["", f"The first examples, what is learned {'green' if color else 'in «»'}:"]
        for heading, parts in self.examples.items():
            shown += [heading, f"  {marked(parts, color=color, most=_MOST_CHARACTERS)}"]
        title = f"DeepSpeed JSON as resolved from {plan.deepspeed_source}:"
        resolved = json.dumps(plan.deepspeed, indent=2)
        return "\n".join([summary(plan, self.counts), *lines, *shown, "", title, resolved])

    def to_json(self) -> dict[str, Any]:
        """Return the dry run as plain values; "plan" is the run's plan.json before it is begun."""
        step = step_time(self.plan)
        return {
            "fits": self.fits,
            "verdict": self.verdict,
            "time": step and step.to_json(),
            "data": self.data,
            "notes": self.notes,
            "run_dir": self.run_dir,
            "examples": self.examples,
            "plan": self.plan.to_json(),
        }


def dry_run(
    plan: Plan, elsewhere: bool = False, trust_remote_code: bool = False, show: int = 0
) -> DryRun:
    """Return the dry run of a plan, with the `show` first examples of each source. `elsewhere`: the
    plan is for other machines.

    Raises ConfigError if the run would reject the run that it continues, or the first records of
    data that is on this machine.
    """
    try:
        goes_on = foreseen(plan)
    except (NoCheckpoint, OSError) as error:
        if isinstance(error, NoCheckpoint) and not elsewhere:
            raise
        goes_on = [str(error)]  # its folder may be on the other machines, or come back
    counts, data, notes, examples = None, ["not readable here"], list[str](), dict[str, Parts]()
    missing = missing_here(plan.config.data)  # not an error: the run may be elsewhere
    if not missing:
        spec = DataSpec.of_run(plan.config, plan.model_config, trust_remote_code=trust_remote_code)
        seen = glances(spec, elsewhere=elsewhere)
        counts = seen.counts()
        plan = with_facts(plan, Facts(counts, has_documents=seen.has_documents))
        notes = seen.notes()
        data = seen.lines(plan.curriculum.samples_after(steps_of(plan, counts)))
        if show:
            from harness.data.batch_text import preview  # imports torch

            examples = preview(spec, show)
    lacking, other = list[str](), missing
    if elsewhere:
        is_short = plan.estimate is not None and plan.estimate.verdict == "does not fit"
        lacking = [verdict(plan)] * is_short
    else:
        disk, is_hopeless = short_of_disk(plan, saved_steps(plan.config.run.dir))
        lacking = [
            *shortages_here(plan.estimate, plan.world, takes(plan)),
            *([disk] * is_hopeless),
            *swap_problems(plan),
        ]
        other = [*([disk] * bool(disk and not is_hopeless)), *missing]
    return DryRun(plan, counts, elsewhere, data, notes, goes_on, lacking, other, examples)
