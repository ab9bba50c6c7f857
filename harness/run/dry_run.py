"""The dry run: the plan, and the first records of its data as the run itself would read them."""

import json
import os
import sys

from harness.data.glance import glances
from harness.data.spec import DataSpec
from harness.errors import NoCheckpoint
from harness.estimate.fit import shortages_here
from harness.plan.batches import steps_of
from harness.plan.data import missing_here
from harness.plan.machine import short_of_disk, swap_problems
from harness.plan.make import takes, with_facts
from harness.plan.plan import Facts, Plan
from harness.plan.text import row, summary, verdict
from harness.run.resumption import foreseen
from harness.runfolder import saved_steps


def without_torch() -> None:
    """Keep transformers from importing torch, which takes seconds and which tokenizers do not need.
    Only for a process that ends with the dry run.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that it is missing
        sys.modules["torch"] = None  # type: ignore[assignment]


def describe(plan: Plan, elsewhere: bool = False, trust_remote_code: bool = False) -> str:
    """Return the summary and the resolved JSON. `elsewhere`: the plan is for other machines.

    Raises ConfigError if the run would reject the run that it continues, or the first records of
    data that is on this machine.
    """
    try:
        goes_on = foreseen(plan)
    except (NoCheckpoint, OSError) as error:
        if isinstance(error, NoCheckpoint) and not elsewhere:
            raise
        goes_on = [str(error)]  # its folder may be on the other machines, or come back
    counts, data, notes = None, ["not readable here"], list[str]()
    missing = missing_here(plan.config.data)  # not an error: the run may be elsewhere
    if not missing:
        spec = DataSpec.of_run(plan.config, plan.model_config, trust_remote_code=trust_remote_code)
        seen = glances(spec, elsewhere=elsewhere)
        counts = seen.counts()
        plan = with_facts(plan, Facts(counts, has_documents=seen.has_documents))
        notes = seen.notes()
        data = seen.lines(plan.curriculum.samples_after(steps_of(plan, counts)))
    shortages = []
    if plan.estimate and not elsewhere:
        shortages = shortages_here(plan.estimate, plan.world, takes(plan))
        shortages += filter(None, [short_of_disk(plan, saved_steps(plan.config.run.dir))[0]])
    shortages += [*([] if elsewhere else swap_problems(plan)), *missing]
    last = row("this machine", "; ".join(shortages) or "can hold it")
    if elsewhere:
        last = row("the cluster", "; ".join([verdict(plan), *shortages]))
    title = f"DeepSpeed JSON as resolved from {plan.deepspeed_source}:"
    rows = [summary(plan, counts), *(row("data", line) for line in data)]
    rows += [
        *(row("note", line) for line in notes),
        *(row("run.dir", line) for line in goes_on),
        last,
    ]
    return "\n".join([*rows, "", title, json.dumps(plan.deepspeed, indent=2)])
