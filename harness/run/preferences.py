"""Preference pairs in a run: the reference, computed once before the first step, and metrics.

The reference is the log-probability of both sides of each pair under the initial weights. It comes
from the training forward pass, in any layout, and is kept beside the tokens in the cache, so that a
resume or another run from the same weights reads it.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from harness.checkpoint.collectives import broadcast_object
from harness.checkpoint.store import checkpoint_of
from harness.config.run_config import run_and_step
from harness.config.sections import REFERENCE_FREE
from harness.data.batch import Batch
from harness.data.batches import batch_of
from harness.data.cache import build_once, cache_key, cached_array
from harness.data.data import Data
from harness.data.packed_documents import WholeWindows
from harness.data.run_tokenizer import cache_of
from harness.data.spec import PAD_TO, DataSpec
from harness.engine.api import ByGroup
from harness.engine.processes import raising_together
from harness.models.preferences import means_of
from harness.plan.plan import Plan
from harness.plan.weights import has_checkpoints
from harness.run.evaluation import EVALUATED_AT_ONCE, rows_of
from harness.run.instrument import Instrument
from harness.run.run import Run
from harness.run.saving import load_into
from harness.steps import Step

_FORMAT = 1
"""Increase this if the same weights would give other numbers."""


@dataclass(frozen=True)
class Reference:
    """Where the reference of a run's pairs is kept, and which pairs need it."""

    folder: Path
    needed: list[tuple[WholeWindows, NDArray[np.int64]]]
    """Windows that the run reads, of each side of the data."""

    @property
    def is_kept(self) -> bool:
        """True if an earlier run has computed it."""
        return self.folder.is_dir()

    def read(self) -> list[NDArray[np.float64]]:
        """Return the reference of the pairs of each side. Raises ConfigError if a file is
        damaged.
        """
        paths = (self.folder / f"{number}.npy" for number in range(len(self.needed)))
        return [np.array(cached_array(path, np.dtype("f8"), rows=2)).T for path in paths]

    def write(self, folder: Path) -> None:
        """Write the reference of all pairs, NaN for those that the run does not read."""
        for number, (packed, _) in enumerate(self.needed):
            np.save(folder / f"{number}.npy", packed.reference.T.copy())


def reference_of(plan: Plan, data: Data, total_steps: int) -> Reference | None:
    """Return the reference that a run needs; None if its objective has none: pairs get zeros."""
    train, evaluated = plan.config.train, plan.config.eval.samples
    if not train.preferences:
        return None
    samples = plan.curriculum.samples_after(total_steps)
    if plan.config.guard.spikes == "rollback":  # which reads on behind discarded samples
        samples = data.train.samples
    windows: dict[int, tuple[WholeWindows, list[NDArray[np.int64]]]] = {}
    counts = [(data.train, samples), *((held_out, evaluated) for held_out in _held_out(data))]
    for stream, count in counts:
        for packed, read in stream.windows_of(np.arange(min(count, stream.samples))):
            assert isinstance(packed, WholeWindows), "a pair stands in one window"
            windows.setdefault(id(packed), (packed, []))[1].append(read)
    needed = [(packed, np.unique(np.concatenate(parts))) for packed, parts in windows.values()]
    if train.objective in REFERENCE_FREE:
        for packed, _ in needed:
            packed.reference = np.zeros_like(packed.reference)
        return None
    key = cache_key(
        format=_FORMAT,
        data=[data.fingerprint, *(source.facts.fingerprint for source in data.set_sources)],
        pairs=[_hash(packed.pairs_in(read)) for packed, read in needed],
        weights=_weights(plan),
        precision=[plan.precision, plan.config.model.float8, plan.config.model.lora.quantize],
    )
    spec = DataSpec.of_run(plan.config, plan.model_config)
    return Reference(cache_of(spec) / f"reference-{key}", needed)


def _hash(rows: NDArray[np.int64]) -> str:
    """Return a hash of which pairs are read, whatever windows they stand in."""
    return hashlib.sha256(np.sort(rows).astype(np.int64).tobytes()).hexdigest()


def _held_out(data: Data) -> Iterator[Any]:
    yield data.held_out
    yield from data.eval_sets.values()


def _weights(plan: Plan) -> list[object]:
    """Return what identifies the initial weights: their files, or how they are drawn."""
    model, source = plan.config.model, plan.config.model.init_from
    if source is None:
        return [plan.config.train.seed, model.init, dict(plan.model_config)]
    folder = Path(run_and_step(source)[0])
    files = sorted(path for path in folder.glob("**/*") if path.suffix in (".safetensors", ".bin"))
    files += sorted(folder.glob("**/manifest.json"))
    stats = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    return [source, stats, model.overrides]


def take_reference(run: Run, reference: Reference | None) -> None:
    """Read the reference, or compute it with the weights of the run that model.init_from names, or
    else with those at hand, which must be the initial ones. Call it before a checkpoint is loaded.
    Raises RunStopped if the run was asked to stop. Collective.
    """
    if reference is None:
        return
    if run.guard.told_by_rank_0(reference.is_kept):
        with raising_together():  # other nodes may have caches of their own
            kept = reference.read() if run.is_writer else []
        for (packed, _), values in zip(reference.needed, broadcast_object(kept), strict=True):
            packed.reference = values
        run.event("reference", path=str(reference.folder), computed=False)
        run.progress.say(f"reference: that of an earlier run, {reference.folder}")
        return
    source = run.plan.config.model.init_from
    if source is not None and has_checkpoints(source):
        load_into(run.engine, checkpoint_of(source), weights_only=True)
    for packed, windows in reference.needed:
        _compute(run, packed, windows)
    if run.is_writer:
        build_once(reference.folder, reference.write, run.progress.say)
    run.event("reference", path=str(reference.folder), computed=True)


def _compute(run: Run, packed: WholeWindows, windows: NDArray[np.int64]) -> None:
    """Compute the log-probabilities of the pairs in some windows, the longest first."""
    plan, device = run.plan, run.engine.device
    windows = windows[np.argsort(-packed.lengths(windows), kind="stable")]
    rows, ranks = rows_of(run, packed.seq_len), plan.share.data_ranks
    values = torch.zeros(2 * packed.split.num_documents, dtype=torch.float64, device=device)
    at_once = rows * ranks * EVALUATED_AT_ONCE
    for first in range(0, len(windows), at_once):
        run.pulse("reference", run.state.step)
        run.guard.stop_if_asked()
        _add(run, packed, windows[first : first + at_once], rows, values)
        done = min(first + at_once, len(windows))
        run.progress.say(f"reference: {done:,} of {len(windows):,} windows")
    values /= plan.grid.tensor
    torch.distributed.all_reduce(values, group=run.engine.group_of("norm"))
    packed.reference = values.view(-1, 2).cpu().numpy()
    unread = np.ones(len(packed.reference), dtype=bool)
    unread[packed.pairs_in(windows)] = False
    packed.reference[unread] = np.nan


def _add(
    run: Run, packed: WholeWindows, windows: NDArray[np.int64], rows: int, values: torch.Tensor
) -> None:
    """Add the log-probabilities of this rank's share of some windows to `values`, by document and
    side.
    """
    share, batches, numbers = run.plan.share, list[Batch](), list[torch.Tensor]()
    sides = list[torch.Tensor]()
    longest = int(packed.lengths(windows).max())
    multiple = math.lcm(PAD_TO, run.plan.ranks_per_row)
    length = min(-(-longest // multiple) * multiple, packed.seq_len)
    per_round = rows * share.data_ranks
    for start in share.starts(-(-len(windows) // per_round) * per_round, rows):
        own = np.arange(start, start + rows)
        read = windows[np.minimum(own, len(windows) - 1)]
        batch = replace(batch_of(packed, read, True).trimmed(length), reference=None)
        batch.labels[torch.from_numpy(own >= len(windows))] = -100  # they fill up the last round
        assert batch.segments is not None, "its windows hold pairs"
        numbers.append(batch.segments.clamp(min=0) + sum(len(part) for part in sides))
        pairs = torch.from_numpy(packed.pairs_in(read))
        sides.append(torch.stack([2 * pairs, 2 * pairs + 1], 1).view(-1))
        batches.append(batch)
    sums = torch.zeros(
        sum(len(part) for part in sides), 2, dtype=torch.float64, device=values.device
    )
    in_order = iter(numbers)
    run.engine.eval_batch(batches, ByGroup(sums, lambda batch: next(in_order)))
    values.index_add_(0, torch.cat(sides).to(values.device), -sums[:, 0])


class PreferenceMetrics(Instrument):
    """Rewards and accuracy of the last steps' pairs."""

    def values(self, step: Step) -> Mapping[str, torch.Tensor]:
        """Return the means since the last line. Collective."""
        objective = self._run.engine.setup.preferences
        if objective is None:
            return {}
        tally = self._run.engine.sum_over_ranks(objective.tallies[1].clone())
        objective.tallies[1].zero_()
        return means_of(tally)


def evaluated_pairs(run: Run) -> dict[str, float]:
    """Return the means over the pairs evaluated since the last call; {} for other objectives.
    Collective.
    """
    objective = run.engine.setup.preferences
    if objective is None:
        return {}
    tally = objective.tallies[0] / run.plan.grid.tensor
    run.sum(tally, over="norm")
    objective.tallies[0].zero_()
    return {f"eval_{name}": float(value) for name, value in means_of(tally).items()}
