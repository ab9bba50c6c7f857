"""Saves checkpoints when due, and loads them; the probe batch that verifies a resume; checks of
replicas; the sample of the data that is kept.
"""

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from harness.checkpoint.collectives import broadcast_object, first_problem, gather_objects
from harness.checkpoint.export import replacing, sweep
from harness.checkpoint.manifest import Checkpoint, Manifest
from harness.checkpoint.reader import Reader, read_probe
from harness.checkpoint.save import Saved
from harness.data.batch import Batch
from harness.data.batches import Stream
from harness.data.data import Data
from harness.data.order import reservoir
from harness.data.packing import Document
from harness.data.pair import write_documents
from harness.data.tokenizer import tokenizer_hash
from harness.engine.api import Engine, Replica
from harness.errors import ConfigError, ExitCode, NoCheckpoint, Unusable
from harness.files.kept_sample import FACTS, HELD_OUT, TRAIN, kept_facts
from harness.guard.replicas import ReplicasDiffer, checksums, largest_difference, outside_majority
from harness.guard.stability import Next, Verdict
from harness.layout.grid import Grid
from harness.models.adapters import adapters_of, described
from harness.plan.plan import Plan
from harness.run.resumption import division
from harness.run.run import Run, is_due

PROBE_SAMPLES = 8  # takes a forward pass of one micro-batch in most layouts
# Relative tolerance of the loss: above the rounding between layouts in the parity gate, below the
# effect of a lost layer.
PROBE_TOLERANCES = {"fp32": 1e-5, "bf16": 2e-3, "fp16": 1e-3}


def probe_batch(data: Data) -> Batch:
    """Return the first held-out samples; with recurrent states, those of one text."""
    return data.held_out.first(PROBE_SAMPLES)


def as_tensors(batch: Batch) -> dict[str, torch.Tensor]:
    """Return a batch as the tensors stored in a checkpoint."""
    tensors = {"input_ids": batch.input_ids, "labels": batch.labels}
    if batch.position_ids is not None:
        tensors["position_ids"] = batch.position_ids
    if batch.goes_on is not None:
        tensors["goes_on"] = batch.goes_on.long()
    return tensors


def stored_probe(checkpoint: Checkpoint) -> Batch:
    """Return the probe batch stored in a checkpoint."""
    tensors = read_probe(checkpoint)
    ids, labels, positions = tensors["input_ids"], tensors["labels"], tensors.get("position_ids")
    if "goes_on" not in tensors:
        return Batch(ids, labels, positions)
    goes_on, windows = tensors["goes_on"].bool(), torch.arange(len(labels))
    return Batch(ids, labels, positions, windows=windows, goes_on=goes_on)


def texts_of(probe: Batch) -> Iterator[Batch]:
    """Yield the texts of a probe batch, each as one long row, for models without carried state."""
    begins, rows = torch.ones(len(probe.labels), dtype=torch.bool), len(probe.labels)
    if probe.goes_on is not None:
        begins = ~probe.goes_on
    starts = [0, *(row for row in range(1, rows) if begins[row]), rows]
    for start, end in itertools.pairwise(starts):
        ids, labels = (part[start:end].reshape(1, -1) for part in (probe.input_ids, probe.labels))
        positions = probe.position_ids
        yield Batch(ids, labels, None if positions is None else positions[start:end].reshape(1, -1))


def loss_of(engine: Engine, batch: Batch) -> float | None:
    """Return the mean loss in nats over a batch's targets; None without targets. Collective.

    All data ranks run the same number of passes: padding samples are masked out. Samples of one
    text are computed in sequence.
    """
    plan, samples, parts = engine.plan, len(batch.labels), list[Batch]()
    at_once = samples if batch.goes_on is None else 1
    for start in plan.share.starts(at_once, plan.micro_batch):
        rows = torch.arange(start, start + plan.micro_batch)
        for first in range(0, samples, at_once):
            places = first + rows % at_once
            labels = batch.labels[places].clone()
            labels[rows >= at_once] = -100
            others = (batch.position_ids, batch.windows, batch.goes_on)
            positions, windows, goes_on = (None if t is None else t[places] for t in others)
            ids = batch.input_ids[places]
            parts.append(Batch(ids, labels, positions, windows=windows, goes_on=goes_on))
    loss, tokens = engine.sum_over_ranks(engine.eval_batch(parts)).tolist()
    return loss / tokens if tokens else None


def check_probe(engine: Engine, checkpoint: Checkpoint, plan: Plan) -> None:
    """Compare the probe batch's loss with the one recorded in the loaded checkpoint. Collective.

    Raises NoCheckpoint with both numbers if they differ.
    """
    expected = checkpoint.manifest.probe_loss
    if expected is None or "probe" in plan.config.resume.allow:
        return
    batch = stored_probe(checkpoint)
    loss = loss_of(engine, batch)
    tolerance = max(
        PROBE_TOLERANCES[plan.precision], PROBE_TOLERANCES[checkpoint.manifest.precision]
    )
    if loss is None or (math.isnan(loss) and math.isnan(expected)):
        return
    if not math.isclose(loss, expected, rel_tol=tolerance):
        raise NoCheckpoint(
            f"{checkpoint.path} was saved with a loss of {expected:.7g} on its probe batch, but it "
            f"is {loss:.7g} here (relative tolerance {tolerance:g}): this is not the saved model, "
            "or library versions differ in their results; set "
            f"resume.allow={','.join([*plan.config.resume.allow, 'probe'])} to resume anyway"
        )


def save(run: Run, background: bool = False) -> None:
    """Save the run, after finishing the last save. Collective. Raises RunStopped (cannot save)."""
    finish_save(run)
    run.pulse("save", run.state.step)
    plan, probe = run.plan, probe_batch(run.data)
    lora = plan.config.model.lora
    manifest = Manifest(
        state=run.state,
        precision=plan.precision,
        model_config=plan.model_config,
        data_fingerprint=run.data.fingerprint,
        engine=run.engine.scalars(),
        probe_loss=loss_of(run.engine, probe),
        held_out_loss=run.held_out_nats,
        watch=run.stability.state(),
        adapters=adapters_of(run.engine.module, lora, plan.config.model.init_from),
        quantization=described(run.engine.module, lora.quantization) if lora.quantization else {},
        about={
            **division(plan),
            "optimizer": plan.deepspeed["optimizer"],
            "versions": {name: version(name) for name in ("torch", "deepspeed", "transformers")},
        },
    )
    run.saver.start(manifest, run.engine.fragments(), as_tensors(probe), background)
    if not background:
        finish_save(run)
    run.meter.restart()


def finish_save(run: Run) -> None:
    """Wait for the pending save, if any, and record it. Collective. Raises RunStopped."""
    if run.saver.is_busy:
        run.pulse("save", run.state.step)
    saved = run.saver.finish()
    if saved is not None:
        _record(run, saved)
        run.meter.restart()


def _record(run: Run, saved: Saved) -> None:
    per_s = saved.bytes / saved.seconds
    run.saver.longest_s = max(run.saver.longest_s, saved.seconds)
    run.pulse.took("save", saved.seconds)  # in the foreground, the last save will take as long
    values = {"stall_s": saved.stall_s, "bytes": saved.bytes, "bytes_per_s": per_s}
    path, took_s = str(saved.path), saved.seconds
    run.event("saved", step=saved.step, path=path, seconds=took_s, **values, removed=saved.removed)
    if run.is_writer:
        run.folder.write_status("running", None, saved.step)
        run.engine.write_monitors(
            [(f"save/{name}", value, run.state.samples) for name, value in values.items()]
        )


# Largest relative difference of a replicated weight over tensor-parallel ranks on GPUs: each
# computes the gradient itself and may sum in a different order. On CPUs there is no difference.
ROUNDING = 1e-2


def check_replicas(run: Run, saves: bool) -> None:
    """Compare the replicas if a check is due, and before every save. Collective.

    Raises ReplicasDiffer with the ranks and the weights.
    """
    every = run.plan.config.guard.replicas_every
    if not every or run.plan.world.world_size == 1 or not (saves or is_due(run.state.step, every)):
        return
    result = broadcast_object(_together(gather_objects(_compared(run))))
    if result.drifted:
        run.event("replicas_drift", step=run.state.step, apart_by_parameter=result.drifted)
    different = result.differing
    if not different:
        if result.weights:
            run.event("replicas_equal", step=run.state.step, tensors=result.weights)
        return
    run.event("replicas_differ", step=run.state.step, ranks_by_parameter=different)
    finish_save(run)  # the replicas were equal when it began
    newest, (name, ranks) = run.saver.store.all()[-1:], next(iter(different.items()))
    owners = f"rank {', '.join(f'{rank}{run.plan.grid.described(rank)}' for rank in ranks)}"
    if name in result.undecided:
        owners += " (no majority)"
    advice = "No checkpoint predates this: restart the run"
    if newest:
        advice = f"{newest[0].name} predates this: resume from it"
    raise ReplicasDiffer(
        f"after step {run.state.step}, ranks differ in {len(different)} weights that should be "
        f"equal, {name} on {owners}: suspect faulty memory or links there. {advice}"
    )


@dataclass
class _Compared:
    """Differences found by one rank, or by all ranks together."""

    weights: int = 0
    differing: dict[str, list[int]] = field(default_factory=dict)
    """Ranks that differ from the majority, by weight name."""
    undecided: set[str] = field(default_factory=set)
    """Names of weights without a majority."""
    drifted: dict[str, float] = field(default_factory=dict)
    """Relative differences attributed to rounding."""


def _together(results: Iterable[_Compared]) -> _Compared:
    whole = _Compared()
    for result in results:
        whole.weights = max(whole.weights, result.weights)
        whole.undecided |= result.undecided
        whole.drifted |= result.drifted
        for name, ranks in result.differing.items():
            whole.differing[name] = sorted({*ranks, *whole.differing.get(name, ())})
    return whole


def _compared(run: Run) -> _Compared:
    """Compare the weights that this rank and others both hold. Collective."""
    engine = run.engine
    replicas = list(engine.replicated())
    sums = checksums((r.tensor for r in replicas), engine.group_of("stage"), engine.device)
    of_holders = [
        (replica, {rank: of_rank[rank] for rank in replica.ranks})
        for replica, of_rank in zip(replicas, sums, strict=True)
    ]
    for name, weight, group in engine.tied():
        (of_rank,) = checksums([weight], group, engine.device)
        of_holders.append((Replica(name, weight, tuple(of_rank), None), of_rank))
    result = _Compared(len(of_holders))
    for replica, of_rank in of_holders:
        if len({*of_rank.values()}) == 1:
            continue
        if _may_drift(run.plan.grid, engine.device.type, replica, of_rank):
            assert replica.group is not None, "it may not drift without one"
            apart = largest_difference(replica.tensor, replica.group, engine.device)
            if apart <= ROUNDING:
                result.drifted[replica.name] = apart
                continue
        ranks = outside_majority(of_rank)
        result.differing[replica.name] = ranks
        if len(ranks) == len(of_rank):
            result.undecided.add(replica.name)
    return result


def _may_drift(grid: Grid, device: str, replica: Replica, of_rank: Mapping[int, int]) -> bool:
    """Return True if a weight differs only between tensor-parallel ranks of a rounding device."""
    if device == "cpu" or replica.group is None:
        return False
    values = {(grid.coords(rank).tensor, value) for rank, value in of_rank.items()}
    return len(values) == len({tensor for tensor, _ in values})


def save_if_due(run: Run, verdict: Verdict) -> None:
    """Save if a save is due or the run ends; never before a rollback or after a divergence.
    Collective. Raises RunStopped (cannot save), and ReplicasDiffer before a save.
    """
    if verdict.next is Next.ROLL_BACK or verdict.code == ExitCode.DIVERGED:
        return
    if verdict.is_written:
        finish_save(run)
    ends = verdict.next is not Next.GO_ON or not run.steps.are_left
    saves = ends or is_due(run.state.step, run.plan.config.save.every)
    check_replicas(run, saves)
    if saves:
        save(run, background=run.plan.config.save.async_ and not ends)
        keep_sample(run)


def load_into(engine: Engine, checkpoint: Checkpoint, weights_only: bool = False) -> None:
    """Load a checkpoint's weights and, unless `weights_only`, the optimizer states. Collective.

    Raises NoCheckpoint on all ranks if the checkpoint lacks something that this model has. Any
    other exception (out of memory, a failed read) is raised on this rank only; starting again may
    help.
    """
    problem = None
    try:
        reader = Reader.of(checkpoint)
        engine.restore(reader.fill, reader.optimizer_kinds if not weights_only else lambda _: ())
    except Unusable as error:
        run = checkpoint.path.parents[1]
        problem = f"{error}: it was saved from another model: set model.init_from={run}/export"
    except FileNotFoundError as error:
        problem = f"{checkpoint.path} cannot be loaded: {type(error).__name__}: {error}"
    if (problem := first_problem(problem)) is not None:
        raise NoCheckpoint(problem)
    engine.refresh_weights()
    if not weights_only:
        engine.restore_scalars(checkpoint.manifest.engine)


MOST_TOKENS = 1 << 23
"""Maximum number of tokens to keep of each split."""


def keep_sample(run: Run) -> None:
    """Write a sample of all data read so far, on rank 0; a failure is recorded as an event."""
    if not (run.plan.config.data.reservoir and run.state.samples):
        return
    run.pulse("save", run.state.step)  # on all ranks: hang reports compare beat counts
    if not run.is_writer:
        return
    folder = run.folder.reservoir_dir
    try:
        _write(run, folder)
    except (OSError, ConfigError) as error:
        message = f"no sample of the data was saved in {folder}: {error}"
        run.event("sample_not_kept", step=run.state.step, message=message)
        run.progress.say(message)
    run.meter.restart()


def _write(run: Run, folder: Path) -> None:
    """Write the folder anew. Raises ConfigError if it holds a sample of other data."""
    sweep(folder, alone=True)  # leftovers of a killed process
    config, data, seen = run.plan.config, run.data, run.state.samples
    key = f"{config.train.seed}:{data.fingerprint}"
    if folder.exists() and kept_facts(folder).get("of") != key:  # maybe the only one of that data
        raise ConfigError("it holds a sample of other data: move it so that a new one can be saved")
    if data.mixture() is None:  # after an epoch the documents repeat
        seen = min(seen, data.train.samples)
    max_samples = max(1, MOST_TOKENS // (run.plan.seq_len + 1))
    kept = reservoir(min(config.data.reservoir, max_samples), seen, key).tolist()
    held_out = range(min(config.eval.samples, max_samples, data.held_out.samples))
    facts: dict[str, Any] = {"of": key, "tokenizer": tokenizer_hash(data.tokenizer)}
    # A .bin/.idx pair may hold ids that the model has but the tokenizer lacks.
    num_ids = max(data.vocab_size, run.plan.model_config.get("vocab_size") or 0)
    sides = ((TRAIN, data.train, kept), (HELD_OUT, data.held_out, held_out))
    with replacing(folder, is_export=False) as unfinished:
        for side, stream, samples in sides:
            facts[f"{side}_tokens"] = _write_side(unfinished / side, stream, samples, num_ids)
        (unfinished / FACTS).write_text(json.dumps(facts))


def _write_side(
    prefix: Path, stream: Stream, samples: Iterable[int], vocab_size: int
) -> int | None:
    """Write samples as a .bin/.idx pair. Return their number of tokens; None if it differs."""
    sizes = set[int]()

    def documents() -> Iterator[Document]:
        for index in samples:
            of_sample = stream.documents_of(index)
            sizes.add(sum(len(ids) for ids, _ in of_sample))
            yield from of_sample

    write_documents(prefix, vocab_size, documents())
    return sizes.pop() if len(sizes) == 1 else None
