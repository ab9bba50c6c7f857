"""Batches in a plan: grouping by length, ramps, evaluations, the number of steps, and what a run
from pretrained weights derives from its data once it is counted.
"""

import math

from harness.config.assignments import COUNTED, IMPLIED
from harness.config.batch import Curriculum
from harness.config.ds_json import Event
from harness.config.run_config import RunConfig
from harness.config.sections import TrainConfig
from harness.layout.families import given_size
from harness.plan.fine_tuning import DOCS, batch_is_open, batch_unit
from harness.plan.plan import Counts, Draft, Plan
from harness.plan.rotary import or_longer, positions_of

_KEY = "data.batching"


def decide_batching(draft: Draft) -> None:
    """Derive the micro-batch from data.tokens_per_batch; reject what needs equal sample lengths."""
    run = draft.config
    if run.data.batching == "packed":
        return
    one_shape = "stages exchange tensors of one shape: use ZeRO 3 instead of stages"
    separately = "every length would be compiled separately: remove model.compile"
    of_documents = "a step's tokens depend on its documents: set train.steps or train.epochs"
    for key, is_on, why in (
        ("pipeline.stages", draft.grid.pipeline > 1, one_shape),
        ("model.compile", run.model.compile, separately),
        (
            *("ramp.length_from", run.ramp.length_from is not None),
            "documents would be cut: remove ramp.length_from",
        ),
        ("train.tokens", run.train.tokens is not None, of_documents),
    ):
        if is_on:
            why = f"but with {key} ({draft.origin(key)}) {why}, or use {_KEY}=packed"
            draft.problems.add(_KEY, why)
    if run.data.tokens_per_batch is None:
        return
    key, micro_batch = "train.micro_batch", run.data.tokens_per_batch // run.data.seq_len
    if run.train.micro_batch not in (None, micro_batch):
        why = (
            f"which makes micro-batches of {micro_batch} windows of data.seq_len "
            f"{run.data.seq_len}, but {key} is {run.train.micro_batch} ({run.origin(key)})"
        )
        draft.problems.add("data.tokens_per_batch", why, "remove one of them")
    draft.config = run.changed({key: micro_batch})


def mark_padding(draft: Draft) -> None:
    """Mask padding from the routers of experts, unless the user set data.document_mask."""
    data = draft.config.data
    has_experts = given_size(draft.model_config, "experts") is not None
    # By default, packed windows hold whole documents only if the data has prompts; then
    # data.document_mask is on anyway.
    has_padding = data.batching != "packed" or data.packing == "whole"
    if not has_padding or data.document_mask is not None or not has_experts:
        return
    draft.config = draft.config.changed({"data.document_mask": True})
    draft.note(
        "marked_padding",
        "data.document_mask is true, so that padding does not count in the balance of routers",
    )


MAX_RISES = 10_000
"""Maximum number of batch increases; counting steps takes time for each."""


def ramp(draft: Draft) -> None:
    """Check ramp.* and set the draft's curriculum."""
    problems_before = len(draft.problems)
    _check_pairs(draft)
    _check_batch(draft)
    _check_length(draft)
    if len(draft.problems) == problems_before:
        draft.curriculum = draft.config.curriculum
    else:
        draft.curriculum = Curriculum(draft.config.train.global_batch)


def note_unfinished_ramp(draft: Draft) -> None:
    """Note that the run ends before its ramp does."""
    curriculum, seq_len, steps = draft.curriculum, draft.config.data.seq_len, draft.steps
    if not steps or not curriculum.rises:
        return
    last = curriculum.at(curriculum.samples_after(steps - 1))
    if last.global_batch < curriculum.global_batch or last.pieces > 1:
        draft.note(
            "unfinished_ramp",
            f"the run ends during its ramp (ramp.*): its last step reads {last.global_batch} "
            f"windows in sequences of {seq_len // last.pieces} tokens",
        )


def _check_pairs(draft: Draft) -> None:
    ramp = draft.config.ramp
    for present, other in (
        *(("batch_from", "batch_tokens"), ("batch_tokens", "batch_from")),
        *(("length_from", "length_tokens"), ("length_tokens", "length_from")),
    ):
        if getattr(ramp, present) is not None and getattr(ramp, other) is None:
            draft.problems.add(f"ramp.{present}", f"but not ramp.{other}", "set both, or neither")
    if ramp.batch_step is not None and ramp.batch_from is None:
        why = "but ramp.batch_from is not set"
        draft.problems.add("ramp.batch_step", why, "set ramp.batch_from, too")


def _check_batch(draft: Draft) -> None:
    ramp, batch, problems = draft.config.ramp, draft.config.train.global_batch, draft.problems
    key = "ramp.batch_from"
    if ramp.batch_from is None:
        return
    step = ramp.batch_step or ramp.batch_from
    if ramp.batch_from >= batch:
        problems.add(key, f"it must be less than train.global_batch, which is {batch}")
    elif (batch - ramp.batch_from) % step:
        below = batch - (batch - ramp.batch_from) % step
        problems.add(
            key,
            f"from which steps of {step} (ramp.batch_step) do not reach train.global_batch {batch}",
            f"set train.global_batch to {below} or {below + step}",
        )
    elif (rises := (batch - ramp.batch_from) // step) > MAX_RISES:
        least = -(-step * rises // MAX_RISES)
        problems.add(key, f"and rises {rises:,} times", f"set ramp.batch_step to {least} or more")


def _check_length(draft: Draft) -> None:
    first, seq_len = draft.config.ramp.length_from, draft.config.data.seq_len
    if first is None:
        return
    halved = [seq_len >> n for n in range(1, seq_len.bit_length()) if not seq_len % 2**n]
    legal = [length for length in halved if length >= 2]
    if first not in legal:
        lengths = ", ".join(map(str, legal)) or "none"
        why = f"it must double to data.seq_len {seq_len}: one of {lengths}"
        draft.problems.add("ramp.length_from", why)


_LONGER, _NEEDLES = "eval.seq_len", "eval.needle_lengths"


def check_evaluation(draft: Draft) -> None:
    """Reject lengths that the model, the data or the ranks cannot evaluate."""
    run, problems = draft.config, draft.problems
    longer, needles = run.eval.seq_len, run.eval.needle_lengths
    if longer is not None and longer < run.data.seq_len:
        problems.add(_LONGER, f"it must be at least data.seq_len, which is {run.data.seq_len}")
    if longer is not None and run.data.batching != "packed":
        why = f"but data.batching={run.data.batching} does not cut text into windows"
        problems.add(_LONGER, why)
    _, limit = positions_of(draft.model_config)
    for key, lengths in ((_LONGER, [longer] if longer else []), (_NEEDLES, needles)):
        if limit and max(lengths, default=0) > limit:
            why = f"but {run.model.name} has {limit} positions"
            way = or_longer(draft.model_config, run, max(lengths))
            problems.add(key, why, f"use at most {limit}{way}")
        if any(length % draft.grid.sequence for length in lengths):
            problems.add(key, f"{draft.grid.sequence} sequence ranks cannot divide it")


FEW_STEPS = 20
"""Runs with fewer steps are noted if the data determines the number."""
USEFUL_EPOCHS = 16
"""Epochs after which further ones add little: Scaling Data-Constrained Language Models (arXiv
2305.16264), fig. 3."""


def note_length(draft: Draft) -> None:
    """Note that a run is too short, if its steps are known before the data is counted."""
    if draft.steps is not None:
        draft.events += length_events(draft.config, draft.steps)


def length_events(config: RunConfig, steps: int) -> list[Event]:
    """Return an event if a run ends during its warm-up, and one if its data gives too few steps."""
    optim, train, events = config.optim, config.train, list[Event]()
    if not steps:
        return events
    warmup = optim.warmup(steps)
    if steps < warmup:
        message = (
            f"the run of {steps:,} steps ends during its warm-up ({warmup:,} steps, "
            f"{optim.warmup_key}): optim.lr is never reached; set optim.warmup_ratio=0.03 "
            "instead, or train longer"
        )
        events.append({"kind": "unfinished_warmup", "message": message})
    length = "train.epochs" if train.epochs is not None else "train.tokens"
    if steps < FEW_STEPS and train.steps is None:  # otherwise the user asked for this number
        count = "1 step" if steps == 1 else f"{steps:,} steps"
        message = (
            f"the run takes only {count}, and each moves a weight by about the learning "
            f"rate: lower train.global_batch (now {train.global_batch:,}), or raise {length}"
        )
        events.append({"kind": "few_steps", "message": message})
    return events


def repetition_events(plan: Plan, steps: int, counts: Counts) -> list[Event]:
    """Return an event if a run repeats its data more often than is useful, or than train.epochs."""
    epochs = plan.curriculum.samples_after(steps) / counts.windows
    train = plan.config.train
    if train.epochs is not None:
        return _more_epochs(plan, counts, epochs) if epochs >= 1.25 * train.epochs else []
    if epochs <= USEFUL_EPOCHS:
        return []
    length = "train.tokens" if train.tokens is not None else "train.steps"
    message = (
        f"the run reads its data {epochs:,.0f} times, and more than about {USEFUL_EPOCHS} times "
        f"help little (arXiv 2305.16264): give data.path more text, or lower {length}"
    )
    return [{"kind": "repeated_data", "message": message}]


def _more_epochs(plan: Plan, counts: Counts, epochs: float) -> list[Event]:
    """Return the event of a batch so large for the data that whole steps read more of it."""
    asked, ranks = plan.config.train.epochs or 0.0, plan.grid.data
    rows = math.ceil(min(1, asked) * counts.windows)
    batch = rows // ranks * ranks
    remedy = f"set train.global_batch={batch}" if batch else f"use at most {rows} data ranks"
    message = (
        f"steps of {plan.global_batch:,} rows read the {counts.windows:,} rows of the data "
        f"{epochs:.3g} times, not {asked:g} (train.epochs): {remedy}"
    )
    return [{"kind": "repeated_data", "message": message}]


def steps_of(plan: Plan, counts: Counts) -> int:
    """Return the number of optimizer steps of a run whose data is counted."""
    if plan.steps is not None:
        return plan.steps
    assert plan.config.train.epochs is not None, "a run has a length"
    return plan.curriculum.steps_for(math.ceil(plan.config.train.epochs * counts.windows))


def length_text(plan: Plan, steps: int | None, counts: Counts | None) -> str:
    """Return the length of a run as text; `counts` adds details if the data is counted."""
    train, data = plan.config.train, plan.config.data
    if steps is None:
        passes = "1 epoch" if train.epochs == 1 else f"{train.epochs:g} epochs"
        about = "about " * ("train.epochs" in open_keys(plan.config))
        return f"{about}{passes}; the number of steps is known once the data is counted"
    samples = plan.curriculum.samples_after(steps)
    read = f"{samples:,} examples"
    if data.batching == "packed":
        read = f"{samples * data.seq_len:,} tokens"
    text = f"{steps:,} steps = {read}"
    return f"{text}: {_counted(plan, samples, counts)}" if counts and steps else text


def _counted(plan: Plan, samples: int, counts: Counts) -> str:
    """Return, as text, the number of examples and windows in the data, and the number of epochs in
    a run of `samples` windows.
    """
    data, batch = plan.config.data, plan.global_batch
    noun = "examples" if counts.is_masked else "documents"
    rows = f"{counts.examples:,} {noun}"
    if data.batching == "packed":
        rows += f" in {counts.windows:,} windows of {data.seq_len:,} tokens"
    unit = "window" if data.batching == "packed" else "example"
    a_step = f"{'up to ' * plan.curriculum.rises}{batch:,} {unit}{'s' * (batch != 1)} per step"
    epochs = samples / counts.windows
    return f"{'roughly ' * counts.is_rough}{rows}, {a_step}, {epochs:.3g} epochs"


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


def open_keys(config: RunConfig) -> set[str]:
    """Return the keys that the user left open and that, with pretrained weights, the data
    determines.
    """
    keys = {"train.global_batch"} if batch_is_open(config) else set()
    if config.origin("train.epochs") == IMPLIED:
        keys.add("train.epochs")
    return keys


SMALLEST = Counts(LEAST_EXAMPLES, 1, is_masked=True)
"""Data that leads to the smallest batch."""


def follow_data(draft: Draft) -> None:
    """Set the batch and epochs that the user left open and that, with pretrained weights, follow
    from the data, once it is counted. All ranks count the same data.
    """
    config, counts = draft.config, draft.facts.counts
    keys = open_keys(config)
    if not keys or counts is None or not counts.windows:
        return
    epochs, batch = config.train.epochs, config.train.global_batch
    if "train.epochs" in keys:
        epochs = float(_usual_epochs(counts))
    if "train.global_batch" in keys:
        batch = _batch(draft, counts, _read(config, counts, epochs))
    why = _why(draft, counts, epochs, batch)
    if "train.epochs" in keys:
        epochs = _epochs(counts, batch)
    values = {"train.global_batch": batch, "train.epochs": epochs}
    values = {key: value for key, value in values.items() if key in keys}
    draft.decide(values, COUNTED)
    if batch == _DEFAULT:
        values.pop("train.global_batch", None)
    if values:
        text = ", ".join(f"{key}={value:g}" for key, value in values.items())
        draft.note("follows_data", f"{text}: {why}")


def _usual_epochs(counts: Counts) -> int:
    """Return the epochs if the batch gives enough steps; text without prompts is read once."""
    if not counts.is_masked:
        return 1
    return max(1, min(USUAL_EPOCHS, MOST_EXAMPLES // max(counts.examples, 1)))


def _epochs(counts: Counts, batch: int) -> float:
    """Return the usual epochs or, up to MOST_EPOCHS, as many as LEAST_STEPS steps need; at most as
    many as `counts.most_windows` allows.
    """
    wanted = math.ceil(LEAST_STEPS * batch / counts.windows)
    epochs = float(max(min(wanted, MOST_EPOCHS), _usual_epochs(counts)))
    whole_steps = (counts.most_windows or 0) // batch * batch
    if not whole_steps:
        return epochs
    # Rounded down so that rounding up to whole steps does not exceed most_windows.
    return min(epochs, math.floor(whole_steps / counts.windows * 1e6) / 1e6)


def _read(config: RunConfig, counts: Counts, epochs: float | None) -> float:
    """Return the number of windows that the run reads; with train.steps, the number in its usual
    epochs.
    """
    if config.train.tokens is not None:
        return config.train.tokens / config.data.seq_len
    windows = (_usual_epochs(counts) if epochs is None else epochs) * counts.windows
    return windows if counts.most_windows is None else min(windows, counts.most_windows)


def _batch(draft: Draft, counts: Counts, read: float) -> int:
    """Return the largest usual batch that gives LEAST_STEPS steps, but no fewer than LEAST_EXAMPLES
    examples per step, rounded up to a multiple that the ranks can divide.
    """
    per_window = max(counts.examples / counts.windows, 1.0)
    sizes = (_DEFAULT, *BATCHES)
    enough = next((size for size in sizes if read >= LEAST_STEPS * size), 1)
    least = next(size for size in reversed(sizes) if size * per_window >= LEAST_EXAMPLES)
    unit = _unit(draft)
    return math.ceil(max(enough, least) / unit) * unit


def _unit(draft: Draft) -> int:
    return batch_unit(draft.grid, draft.config.train, draft.ds.tree)


def _why(draft: Draft, counts: Counts, epochs: float | None, batch: int) -> str:
    """Return the reason for the chosen batch and epochs. `epochs`: how often the data would be read
    by default.
    """
    steps = math.ceil(_read(draft.config, counts, epochs) / _DEFAULT)
    passes = "" if draft.config.train.tokens else f" of {epochs or _usual_epochs(counts):g} epochs"
    why = f"{_DEFAULT} windows per step would make {steps:,} steps{passes}"
    if steps < LEAST_STEPS:
        why += f", fewer than {LEAST_STEPS}"
    if (unit := _unit(draft)) > 1 and batch == unit:
        why += f"; the ranks need at least {unit} windows per step"
    return f"{why} ({DOCS})"
