"""Checks of what a plan takes from the user's own file (run.code): own.*, loss, schedule.

config/own.py runs the file.
"""

from harness.config.assignments import CHOSEN, did_you_mean
from harness.config.own import METRICS, ROWS
from harness.errors import worded
from harness.layout.tensor import TensorPlan
from harness.plan.plan import Draft


def check_values(draft: Draft) -> None:
    """Reject keys of own.* that no function takes; require those that have no default."""
    config, taken = draft.config, [f"own.{key}" for row in ROWS.values() for key in row.keys]
    used = {
        ("optimizer", config.optim.name),
        ("loss", config.train.loss),
        ("attention", config.model.attention),
        ("schedule", config.optim.schedule),
        *(("metric", name) for name in METRICS),
    }
    why = "but there is no run.code, whose functions take these keys"
    if config.run.code is not None:
        why = f"but no function in {config.run.code} has a parameter of this name"
    for name, value in config.own.given.items():
        key = f"own.{name}"
        if key not in taken:
            text = f"{why}{did_you_mean(key, taken)}"
            draft.problems.say(worded(key, value, config.origin(key), text))
    for row in (ROWS[each] for each in ROWS if each in used):
        missing = (key for key, needed in row.keys.items() if needed)
        missing = (key for key in missing if key not in config.own.given)
        draft.problems.say(*(f"own.{key} is missing: {row} needs it" for key in missing))


def check_loss(draft: Draft) -> None:
    """Reject what does not fit a loss that needs all logits and adds up tokens; note its memory."""
    config, problems = draft.config, draft.problems
    name = config.train.loss
    if ("loss", name) not in ROWS:
        return
    needs = f"but train.loss={name} needs all logits at once"
    if config.model.loss_chunk is None:
        draft.decide({"model.loss_chunk": 0}, CHOSEN)
    elif config.model.loss_chunk:
        problems.add("model.loss_chunk", needs, "leave it out")
    if config.train.label_smoothing:
        problems.add("train.label_smoothing", f"which train.loss={name} does not see", "use 0")
    if draft.grid.tensor > 1 and draft.model_config and _divides_vocabulary(draft):
        why = f"it needs all logits, but {draft.grid.tensor} tensor-parallel ranks divide them"
        problems.add("train.loss", why, "use ZeRO, pipeline stages or sequence parallelism")
    draft.note("own_loss", f"memory and time of train.loss={name} are those of cross_entropy")


def _divides_vocabulary(draft: Draft) -> bool:
    try:
        return TensorPlan.of(draft.model_config).divides_vocabulary(draft.grid.tensor)
    except ValueError:  # already reported
        return False


def check_schedule(draft: Draft) -> None:
    """Try the user's own schedule."""
    config = draft.config
    row = ROWS.get(("schedule", config.optim.schedule))
    if row is None or len(draft.problems):
        return
    for progress in (0.0, 0.5, 1.0):
        try:
            share = row.bound(config.own.given)(progress)
        except Exception as error:
            draft.problems.say(*row.failed(error).problems)
            return
        if not isinstance(share, int | float) or not -1e-9 <= share <= 1 + 1e-9:
            what = "a position from 0 (the lowest rate) to 1 (the peak)"
            draft.problems.say(f"{row} returns {share!r} at progress {progress}, not {what}")
            return
