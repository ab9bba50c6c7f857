"""Batch and epochs of a run from pretrained weights, chosen once its data is counted."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from harness.config.assignments import COUNTED, IMPLIED
from harness.config.batch import BatchSizes
from harness.config.ds_json import literal
from harness.config.sections import TrainConfig
from harness.plan.fine_tuning import DOCS, batch_is_open, batch_unit
from harness.plan.model import estimated
from harness.plan.pipeline import BUBBLE, bubble_events, by_memory
from harness.plan.plan import Plan

LEAST_STEPS = 100
"""Optimizer steps to aim for when batch and epochs are chosen: Adam moves a weight by about its
learning rate per step."""
LEAST_EXAMPLES = 8
"""Minimum examples per step, on average: the batch in axolotl's and LLaMA-Factory's recipes. One
window that packs this many is enough."""
BATCHES = (32, 16, 8, 4, 2, 1)
"""Windows per step to try if the default of train.global_batch would give too few steps."""
USUAL_EPOCHS, MOST_EXAMPLES = 3, 25_000
"""As in OpenAI's fine-tuning: three epochs of up to 25,000 examples in total."""
MOST_EPOCHS = 15
"""As in LIMA (arXiv 2305.11206, section 3): a thousand examples, 15 times."""
_DEFAULT = TrainConfig().global_batch


@dataclass(frozen=True)
class Counts:
    """Size of the data that a run trains on."""

    examples: int
    """Rows of the user's data: conversations, pairs or documents."""
    windows: int
    """Rows that steps read: windows of data.seq_len packed tokens, or examples (data.batching)."""
    is_masked: bool
    """True if prompts are masked from the loss."""
    most_windows: int | None = None
    """Maximum windows of a run, if the sources of a mixture end; None: unlimited."""
    is_rough: bool = False
    """True if the data has not been tokenized yet."""

    @property
    def usual_epochs(self) -> int:
        """Epochs if the batch gives enough steps; text without prompts is read once."""
        if not self.is_masked:
            return 1
        return max(1, min(USUAL_EPOCHS, MOST_EXAMPLES // max(self.examples, 1)))


def open_keys(plan: Plan) -> set[str]:
    """Return the keys left open by the user that the data determines for pretrained weights."""
    keys = {"train.global_batch"} if batch_is_open(plan.config) else set()
    if plan.config.origin("train.epochs") == IMPLIED:
        keys.add("train.epochs")
    return keys


def with_counts(plan: Plan, counts: Counts) -> Plan:
    """Return the plan with the batch and epochs that follow from its data, and an event.

    All ranks count the same data, so they arrive at the same plan.
    """
    keys = open_keys(plan)
    if not keys or not counts.windows:
        return plan
    epochs, batch = plan.config.train.epochs, plan.global_batch
    if "train.epochs" in keys:
        epochs = float(counts.usual_epochs)
    if "train.global_batch" in keys:
        batch = _batch(plan, counts, _read(plan, counts, epochs))
    why = _why(plan, counts, epochs, batch)
    if "train.epochs" in keys:
        epochs = _epochs(counts, batch)
    values = {"train.global_batch": batch, "train.epochs": epochs}
    settled = _with_batch(plan, batch)
    shown = {key: values[key] for key in values if key in keys}
    origins = plan.config.origins() | dict.fromkeys(keys, COUNTED)
    config = settled.config.changed(shown).with_origins(origins)
    if batch == _DEFAULT:
        shown.pop("train.global_batch", None)
    events = settled.events
    if shown:
        text = ", ".join(f"{key}={value:g}" for key, value in shown.items())
        events = (*events, {"kind": "follows_data", "message": f"{text}: {why}"})
    return replace(settled, config=config, events=events)


def _epochs(counts: Counts, batch: int) -> float:
    """Return the usual epochs, or as many as LEAST_STEPS steps need; at most MOST_EPOCHS."""
    wanted = math.ceil(LEAST_STEPS * batch / counts.windows)
    epochs = float(max(min(wanted, MOST_EPOCHS), counts.usual_epochs))
    whole_steps = (counts.most_windows or 0) // batch * batch
    if not whole_steps:
        return epochs
    # Rounded down so that rounding up to whole steps does not exceed most_windows.
    return min(epochs, math.floor(whole_steps / counts.windows * 1e6) / 1e6)


def with_least_batch(plan: Plan) -> Plan:
    """Return the plan with the smallest batch that its data could lead to."""
    return _with_batch(plan, _unit(plan)) if "train.global_batch" in open_keys(plan) else plan


def _read(plan: Plan, counts: Counts, epochs: float | None) -> float:
    """Return the windows that the run reads; for its usual epochs if the user set train.steps."""
    train, data = plan.config.train, plan.config.data
    if train.tokens is not None:
        return train.tokens / data.seq_len
    windows = (counts.usual_epochs if epochs is None else epochs) * counts.windows
    return windows if counts.most_windows is None else min(windows, counts.most_windows)


def _batch(plan: Plan, counts: Counts, read: float) -> int:
    """Return the largest usual batch that gives LEAST_STEPS steps and at least LEAST_EXAMPLES
    examples per step, as a multiple that the ranks can divide.
    """
    per_window = max(counts.examples / counts.windows, 1.0)
    sizes = (_DEFAULT, *BATCHES)
    enough = next((size for size in sizes if read >= LEAST_STEPS * size), 1)
    least = next(size for size in reversed(sizes) if size * per_window >= LEAST_EXAMPLES)
    unit = _unit(plan)
    return math.ceil(max(enough, least) / unit) * unit


def _unit(plan: Plan) -> int:
    return batch_unit(plan.grid, plan.config.train, plan.deepspeed_given)


def _with_batch(plan: Plan, windows: int) -> Plan:
    """Return the plan with another batch, divided over its ranks."""
    if windows == plan.global_batch:
        return plan
    accum = literal(plan.deepspeed_given, "gradient_accumulation_steps")
    batch = BatchSizes.divided(windows, plan.grid.data, plan.config.train.micro_batch, accum)
    deepspeed = {
        **plan.deepspeed,
        "train_batch_size": windows * plan.grid.sequence,
        "train_micro_batch_size_per_gpu": batch.micro_batch,
        "gradient_accumulation_steps": batch.grad_accum,
    }
    events = [event for event in plan.events if event["kind"] != BUBBLE]
    changed = replace(
        plan,
        config=plan.config.changed({"train.global_batch": windows}),
        deepspeed=deepspeed,
        global_batch=windows,
        micro_batch=batch.micro_batch,
        grad_accum=batch.grad_accum,
        events=(*events, *bubble_events(plan.grid.pipeline, batch.grad_accum)),
    )
    return estimated(by_memory(changed))


def _why(plan: Plan, counts: Counts, epochs: float | None, batch: int) -> str:
    """Return the reason for batch and epochs; by default the data would be read `epochs` times."""
    steps = math.ceil(_read(plan, counts, epochs) / _DEFAULT)
    passes = "" if plan.config.train.tokens else f" of {epochs or counts.usual_epochs:g} epochs"
    why = f"{_DEFAULT} windows per step would make {steps:,} steps{passes}"
    if steps < LEAST_STEPS:
        why += f", fewer than {LEAST_STEPS}"
    if (unit := _unit(plan)) > 1 and batch == unit:
        why += f"; the ranks need at least {unit} windows per step"
    return f"{why} ({DOCS})"
