"""Defaults for a run from pretrained weights: their shape, a learning rate for their width, a short
warm-up. Batch and epochs follow from the data (plan/batches.py). For random weights, the learning
rate follows from the number of parameters.

docs/models.md#fine-tuning lists all of them with their sources.
"""

import contextlib
import math
from collections.abc import Mapping
from typing import Any

from harness.config.assignments import BY_RANKS, BY_SIZE, IMPLIED
from harness.config.ds_json import literal
from harness.config.optim_and_schedule import OptimConfig
from harness.config.run_config import RunConfig, run_and_step
from harness.config.sections import LENGTHS, MAX_SAMPLES, TrainConfig
from harness.files.paths import script
from harness.files.records import Unreadable, read_object
from harness.layout.families import given_size
from harness.layout.grid import Grid
from harness.layout.shape import Shape, active_parameters
from harness.plan.memory import traced_shape
from harness.plan.model_config import preset_rate
from harness.plan.plan import Draft
from harness.plan.weights import has_checkpoints

# Peak learning rates of Adam for models of width 4,096. All weights: as in Llama 2's fine-tuning
# (arXiv 2307.09288, section 3.1). Adapters: QLoRA's for models of up to 13B (arXiv 2305.14314,
# table 9). The 65B models of QLoRA and LIMA (arXiv 2305.11206) are twice as wide and use half the
# rate.
FULL_LR, ADAPTER_LR, WIDTH = 2e-5, 2e-4, 4096
PREFERENCES = 1 / 40
"""Factor of these rates for preferences: 5e-7 for all weights, as Zephyr 7B (arXiv 2310.16944)."""
MOST_LR = OptimConfig().lr
"""Learning rate for a small model from random weights; the default never exceeds it."""
WARMUP_RATIO = 0.03
"""The value in Alpaca, QLoRA and axolotl."""
DOCS = "docs/models.md#fine-tuning"
EPOCHS = 3.0
"""Epochs to assume until the data is counted: the usual number for data with masked prompts."""
_OF_ADAMS_SIZE = ("adamw", "adam", "adam8bit", "muon")
"""Optimizers that use the same learning rates as Adam."""
WARMUP = ("optim.warmup_steps", "optim.warmup_ratio")


def take_export(draft: Draft) -> None:
    """Start adapters on a run from its export: they are put on the files of a whole model. Reject a
    run of adapters, whose checkpoints hold no other weights.
    """
    key, config = "model.init_from", draft.config
    source = config.model.init_from or ""
    if not has_checkpoints(source):
        return
    if config.model.lora.rank is None:
        run, _ = run_and_step(source)
        record: Any = {}
        with contextlib.suppress(Unreadable, OSError, KeyError, TypeError):  # a damaged record
            record = (read_object(run / "plan.json") or {})["run"]["model"]["lora"]
        if isinstance(record, dict) and record.get("rank") is not None:
            tool = script("tools/export_hf.py")
            why = "whose checkpoints hold adapters alone"
            use = f"run python {tool} {run} --merge, and set model.init_from={run}/export"
            draft.problems.add(key, why, use)
        return
    run, step = run_and_step(source)
    export = run / ("export" if step is None else f"export-step-{step}")
    names = {path.name for path in export.iterdir()} if export.is_dir() else set()
    if "config.json" in names:
        draft.decide({key: str(export)}, config.origin(key))
        draft.note("fine_tuning", f"adapters start from the export of {source}: {key}={export}")
        return
    merge = " --merge" if "adapter_config.json" in names else ""
    why = f"but {export} holds no whole model, from which adapters start"
    tool = script("tools/export_hf.py")
    draft.problems.add(key, why, f"write it with python {tool} {source}{merge}")


def default_to_fine_tuning(draft: Draft) -> None:
    """Fill in the shape, warm-up and length that the user left open with model.init_from."""
    config = draft.config
    source, defaults = config.model.init_from, dict[str, Any]()
    if not is_pretrained(config):
        return
    if source is not None and not config.is_set("model.name"):
        defaults["model.name"] = source
    if not any(map(config.is_set, WARMUP)):
        defaults["optim.warmup_ratio"] = WARMUP_RATIO
    if not any(map(config.is_set, LENGTHS)):
        defaults["train.epochs"] = EPOCHS
    if not defaults:
        return
    draft.decide(defaults, IMPLIED)
    shown = ", ".join(f"{key}={value}" for key, value in defaults.items() if key != "train.epochs")
    if shown:
        message = f"{shown}: the defaults of a run with pretrained weights ({DOCS})"
        draft.note("fine_tuning", message)


def is_pretrained(config: RunConfig) -> bool:
    """Return True for weights that are not random, and for adapters, whose weights a plan for other
    machines need not name.
    """
    return config.model.init_from is not None or config.model.lora.rank is not None


def default_to_divisible_batch(draft: Draft) -> None:
    """Raise a default batch to the next size that the ranks divide. Note it, or that the JSON sets
    only a micro-batch, unless the data will determine the batch.
    """
    config, ds, key = draft.config, draft.ds, "train.global_batch"
    if config.is_set(key) or config.ramp.batch_from is not None:
        return
    unit, default = batch_unit(draft.grid, config.train, ds.tree), config.train.global_batch
    batch, chosen, hint = math.ceil(default / unit) * unit, "its default", ""
    if default != batch <= MAX_SAMPLES:
        draft.decide({key: batch}, BY_RANKS)
        chosen += f" of {default} rounded up to data ranks x micro-batch x accumulation"
    if ds.literal("train_micro_batch_size_per_gpu") and batch != unit:
        hint = f"; DeepSpeed alone would take {unit}"
    if (batch != default or hint) and not batch_is_open(config):
        draft.note("batch", f"{key} is {batch}, {chosen}: set it to a multiple of {unit}{hint}")


def batch_is_open(config: RunConfig) -> bool:
    """Return True if the data determines the batch of a run from pretrained weights."""
    is_ordered = config.train.carry_state or config.data.mix_until is not None
    is_left_open = config.origin("train.global_batch") in ("default", BY_RANKS)
    rises = config.ramp.batch_from is not None
    return is_pretrained(config) and is_left_open and not (is_ordered or rises)


def batch_unit(grid: Grid, train: TrainConfig, ds: Mapping[str, Any]) -> int:
    """Return the number of windows that every batch is a multiple of: data ranks x micro-batch x
    accumulation, the latter two as far as the user set them.
    """
    accum = literal(ds, "gradient_accumulation_steps") or 1
    return int(grid.data * (train.micro_batch or 1) * accum)


def default_to_their_rate(draft: Draft) -> None:
    """Set the learning rate for the width of pretrained weights if the user left it open: Adam's
    best rate is inversely proportional to the width (arXiv 2203.03466).
    """
    config = draft.config
    is_ours = config.optim.name in _OF_ADAMS_SIZE and not config.is_set("optim.lr")
    if not (is_pretrained(config) and is_ours):
        return
    has_adapters = config.model.lora.rank is not None
    kind, rate = ("adapters", ADAPTER_LR) if has_adapters else ("all weights", FULL_LR)
    if config.train.preferences:
        kind, rate = f"preferences with {kind}", rate * PREFERENCES
    width, why = given_size(draft.model_config, "hidden") or WIDTH, f"the rate for {kind}"
    if width > 0 and width != WIDTH:  # find_model reports other sizes
        why = f"{rate:g} x {WIDTH} / {width}, the rate for {kind} at this width"
        rate = rate * WIDTH / width
    lr = float(f"{min(rate, MOST_LR):.2g}")
    draft.decide({"optim.lr": lr}, IMPLIED)
    draft.note("fine_tuning", f"optim.lr={lr:g}: {why}")


# Active parameters per token, Adam's peak learning rate for random weights of this size, and its
# source. Between two sizes, the logarithms of the rates are interpolated over those of the sizes.
_BY_SIZE = (
    (5e6, MOST_LR, "chosen here, for real text on two CPU cores"),
    (124e6, 6e-4, "GPT-3 Small, arXiv 2005.14165, table 2.1"),
    (1.1e9, 4e-4, "TinyLlama 1.1B, arXiv 2401.02385"),
    (8e9, 3e-4, "Llama 3 8B, arXiv 2407.21783, table 3"),
    (70e9, 1.5e-4, "Llama 3 70B, arXiv 2407.21783, table 3"),
    (405e9, 8e-5, "Llama 3 405B, arXiv 2407.21783, table 3"),
)
FAR_OFF = 5.0
"""A plan notes a learning rate that is more than this factor above or below the published one."""


def default_to_published_rate(draft: Draft) -> None:
    """Set the peak learning rate of random weights, if the user left it open, to a published one of
    their size. Note a rate that is far off.
    """
    config = draft.config
    if is_pretrained(config) or config.optim.name not in _OF_ADAMS_SIZE:
        return
    usual = published_rate(draft)
    if config.is_set("optim.lr"):
        rate, source = usual or (config.optim.lr, "")
        times = config.optim.lr / rate
        if rate < MOST_LR and max(times, 1 / times) > FAR_OFF:  # none is published for small models
            more = f"{times:,.0f} times" if times > 1 else f"1/{1 / times:,.0f} of"
            draft.note(
                "learning_rate",
                f"optim.lr is {config.optim.lr:g} ({config.origin('optim.lr')}), {more} the "
                f"{rate:g} that is usual at this size ({source})",
            )
        return
    if usual is None:
        draft.note(
            "learning_rate",
            f"optim.lr is {config.optim.lr:g}, the default of small models: the size of this one "
            "is unknown, because its class cannot be traced",
        )
        return
    rate, _ = usual
    if rate != config.optim.lr:
        draft.decide({"optim.lr": rate}, BY_SIZE)


def published_rate(draft: Draft) -> tuple[float, str] | None:
    """Return the peak learning rate for random weights and its source; None for an unknown size."""
    own = None if draft.config.model.overrides else preset_rate(draft.model_source)
    shape = None if own else draft.shape or traced_shape(draft)
    if shape is None:
        return own
    return _by_size(_BY_SIZE, active_parameters(shape))


# As _BY_SIZE, for pretrained weights that go on pretraining (docs/recipes/continued.toml).
_CONTINUED = (
    (7e9, 1e-4, "Llemma 7B, arXiv 2310.10631"),
    (34e9, 5e-5, "Llemma 34B, arXiv 2310.10631"),
)


def continued_rate(shape: Shape) -> tuple[float, str]:
    """Return the peak learning rate for continued pretraining and its source."""
    return _by_size(_CONTINUED, active_parameters(shape))


def _by_size(table: tuple[tuple[float, float, str], ...], count: int) -> tuple[float, str]:
    """Return the rate for a number of parameters, and its source."""
    sizes, rates, sources = zip(*table, strict=True)
    if count <= sizes[0] or count >= sizes[-1]:
        return (rates[0], sources[0]) if count <= sizes[0] else (rates[-1], sources[-1])
    after = next(n for n, size in enumerate(sizes) if size > count)
    low, high = sizes[after - 1], sizes[after]
    share = math.log(count / low) / math.log(high / low)
    rate = rates[after - 1] * (rates[after] / rates[after - 1]) ** share
    near = sources[after if share > 1 / 2 else after - 1]
    return float(f"{rate:.2g}"), f"by size, near {near}"
