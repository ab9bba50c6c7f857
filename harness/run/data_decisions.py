"""Decisions that depend on the data, and checks that it suffices."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from harness.checkpoint.collectives import broadcast_object
from harness.config.assignments import DECIDED, flat
from harness.config.data_section import REHEARSED
from harness.config.sections import LENGTHS
from harness.data.data import Data
from harness.data.padded import Padded
from harness.data.spec import tokenizer_of
from harness.data.tokenizer_files import has_tokenizer
from harness.engine.processes import raise_together
from harness.errors import ConfigError
from harness.plan.batches import length_events, repetition_events, steps_of
from harness.plan.make import with_facts
from harness.plan.parallelism import padded
from harness.plan.plan import Counts, Facts, Plan
from harness.plan.text import row, settled
from harness.run.attention import attention_event, verify_attention
from harness.run.progress import Progress


def decide_from_data(
    plan: Plan, data: Data, device: torch.device, progress: Progress
) -> tuple[Plan, int, list[dict[str, Any]]]:
    """Report on the data; return the resolved plan, number of steps and events. Collective.

    Raises ConfigError on every rank if the data is not suitable for the run.
    """
    for line in data.summary():
        progress.say(row("data", line))
    for line in data.warnings():
        progress.say(row("note", line))
    _require_same_data(plan.world.rank, data)
    before, train = plan, data.train
    counts = Counts(train.documents, train.samples, train.is_masked, train.length)
    plan = with_facts(plan, Facts(counts, data.vocab_size, data.document_mask))
    total_steps = steps_of(plan, counts)
    progress.say(settled(plan, counts, before))
    if problems := plan.config.profile.problems(total_steps):
        raise ConfigError(problems)
    _require_date_is_written(plan, data)
    _require_targets(plan, data)
    if train.holds_whole_documents and plan.config.ramp.length_from is not None:
        raise ConfigError(
            f"ramp.length_from is {plan.config.ramp.length_from}, which splits windows, but they "
            "contain whole documents (data.packing, the default if prompts are masked): remove "
            "ramp.length_from, or set data.packing=stream"
        )
    is_new = plan.config.model.attention != before.config.model.attention
    chosen = [attention_event(plan)] if is_new else []
    plan, verified = verify_attention(plan, device)
    for event in (attention := [*chosen, *verified]):
        progress.say(row("attention", event["message"]))
    for line in data.shares(_samples_of(plan, data, total_steps)):
        progress.say(row("mixture", line))
    batched = _batched(plan, data, total_steps)
    for event in batched:
        progress.say(row("batches", event["message"]))
    vocabulary = _vocabulary(plan, data)
    for event in vocabulary:
        progress.say(row("note", event["message"]))
    more = [*vocabulary, *attention, *batched]
    if data.names and plan.config.model.kernels == "liger":
        why = "model.kernels=liger returns only the total loss of all sources: no loss/NAME"
        more.append({"kind": "sources_unseen", "message": why})
    more += length_events(plan.config, total_steps) if plan.steps is None else []
    more += repetition_events(plan, total_steps, counts)
    return plan, total_steps, [*data.events(), *more]


# Settings that may differ between nodes: folders, and data, whose fingerprint is compared.
_OF_A_NODE = ("run.", "data.", "log.", "resume.", "model.name", "model.init_from")


def require_same_settings(plan: Plan) -> None:
    """Raise ConfigError on all ranks if one was started with other settings than rank 0. It would
    hang in a collective, or train with another learning rate. Collective.
    """
    own = dict(flat(plan.config.model_dump(mode="json")))
    own = {key: value for key, value in own.items() if not key.startswith(_OF_A_NODE)}
    own["run.code"] = plan.code and plan.code["sha256"]
    own |= {f"ds.{key}": value for key, value in flat(plan.deepspeed) if "nvme_path" not in key}
    first = broadcast_object(own)
    unlike = [key for key in {**first, **own} if first.get(key) != own.get(key)]
    texts = (f"{key} is {own.get(key)}, not {first.get(key)}" for key in unlike[:3])
    problem = (
        f"rank {plan.world.rank} has other settings than rank 0: {'; '.join(texts)}: give all "
        "ranks the same arguments and files; where their GPUs or packages differ, set "
        "model.kernels, model.compile and train.micro_batch"
    )
    raise_together(problem if unlike else None)


def _require_same_data(rank: int, data: Data) -> None:
    """Raise ConfigError on all ranks if one has different token ids from rank 0. Collective."""
    sources = [*data.sources, *data.set_sources]
    sources += [data.old_source] if data.old_source else []
    own = [s.facts.fingerprint for s in sources], [s.day for s in sources if s.day]
    first, problem = broadcast_object(own), None
    if own[0] != first[0]:
        problem = f"rank {rank} has other token ids than rank 0: "
        if own[1] != first[1]:  # the ranks started around midnight
            dates = [next(iter(days), "none") for _, days in (own, first)]
            problem += (
                f"its chat template writes the date {dates[0]}, that of rank 0 {dates[1]}: start "
                f"again, or set data.date={dates[1]}"
            )
        else:
            problem += (
                "documents or tokenizer differ there (for a .bin above 32 GiB, perhaps only its "
                "modification time): give every node the same files"
            )
    raise_together(problem)


def _require_date_is_written(plan: Plan, data: Data) -> None:
    """Raise ConfigError if the user set a date that no chat template uses."""
    sources = (*data.sources, *data.set_sources)
    is_users = plan.config.origin("data.date") not in DECIDED
    if is_users and not any(source.day for source in sources):
        has_chats = any(source.corpus.holds_chats for source in sources)
        other = ", or set data.template to one that does" if has_chats else ""
        raise ConfigError(
            f"data.date is {plan.config.data.date}, but no chat template here calls "
            f"strftime_now: remove data.date{other}"
        )


def _require_targets(plan: Plan, data: Data) -> None:
    """Raise ConfigError if held-out samples have no targets: their mean loss would be undefined."""
    old = {} if data.old is None else {REHEARSED: data.old}
    for name, stream in {"": data.held_out, **data.eval_sets, **old}.items():
        samples = min(plan.config.eval.samples, stream.samples)
        if not stream.targets_in(0, samples):
            of_set = f" of {name}" if name else ""
            use = f"raise eval.samples (now {plan.config.eval.samples}), or data.seq_len"
            if samples == stream.samples:
                use = "raise data.seq_len, or add held-out text (data.held_out, data.eval_path)"
            raise ConfigError(
                f"the {samples} held-out windows{of_set} contain no target, only prompts: {use}"
            )


def _batched(plan: Plan, data: Data, steps: int) -> list[dict[str, Any]]:
    """Return an event with the padding of micro-batches, compared with other ways of batching."""
    if not isinstance(data.train, Padded) or not steps:
        return []
    how = plan.curriculum, plan.micro_batch, plan.share.data_ranks, steps
    shares = data.train.padding_shares(*how)
    return [
        {
            "kind": "batched",
            "message": f"{plan.config.data.batching}: {shares.text()}",
            **asdict(shares),
        }
    ]


def _vocabulary(plan: Plan, data: Data) -> list[dict[str, Any]]:
    """Return an event if the model has many more rows than the tokenizer has ids."""
    source, rows = plan.config.model.init_from, plan.model_config.get("vocab_size")
    if not isinstance(rows, int) or data.vocab_size > 0.9 * rows:
        return []
    message = f"only {data.vocab_size:,} of {rows:,} vocabulary rows are used"
    if source is None:
        if (Path(plan.config.run.dir or "none") / "plan.json").exists():
            return []  # the rows of a run that goes on are what they are
        advice = f"set model.overrides.vocab_size={padded(data.vocab_size, plan.grid.tensor)}"
    else:
        advice = _fitting_tokenizer(plan.config.data.tokenizer, str(tokenizer_of(source)))
    return [{"kind": "unused_rows", "message": f"{message}: {advice}"}]


def _fitting_tokenizer(tokenizer: str | None, own: str) -> str:
    """Return advice on which tokenizer belongs to weights that came from `own`."""
    if tokenizer in (None, own):
        return f"{own}, where the weights are from, has no larger tokenizer: the rest is unused"
    if Path(own).is_dir() and not has_tokenizer(Path(own)):
        return (
            f"data.tokenizer is {tokenizer}, and {own}, where the weights are from, has none: set "
            "data.tokenizer to the one that they were trained with"
        )
    return (
        f"data.tokenizer is {tokenizer}; the weights were trained with {own}'s: set "
        f"data.tokenizer={own}, or leave the key out"
    )


def _samples_of(plan: Plan, data: Data, total_steps: int) -> int:
    """Return the number of samples of the run. Raises ConfigError if the data ends earlier."""
    samples, length = plan.curriculum.samples_after(total_steps), data.train.length
    if length is not None and samples > length:
        of_run = next((key for key in LENGTHS if plan.config.is_set(key)), LENGTHS[0])
        raise ConfigError(
            f"data.mix: every source reaches its epochs after {length:,} windows, but the run of "
            f"{total_steps:,} steps reads {samples:,}: raise the epochs, or lower {of_run}"
        )
    return samples
