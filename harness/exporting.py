"""A checkpoint, exported: which model it is of, and proof that the folder holds it."""

from __future__ import annotations

import logging
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.checkpoint.export import SHARD_BYTES, Progress, opened, replacing, write_model
from harness.checkpoint.load import Checkpoint
from harness.errors import ConfigError
from harness.models.loss import forward
from harness.models.skeleton import DTYPES, hf_config, skeleton
from harness.probe import TOLERANCES, stored_probe


class ExportDiffers(Exception):
    """The exported model is not the one that was saved."""


@dataclass(frozen=True)
class Wish:
    """How a checkpoint is exported.

    `dtype`: one of DTYPES, or the run's own precision. `source`: the folder or hub id of the model,
    read where it brings its own code and that may run. `check`: compare the probe's loss, for which
    the model is opened on the CPU.
    """

    dtype: str | None = None
    shard_bytes: int = SHARD_BYTES
    check: bool = True
    source: str | None = None
    trust_remote_code: bool = False


def export(
    checkpoint: Checkpoint,
    folder: Path,
    tokenizer: Path,
    wish: Wish,
    progress: Progress = lambda done, total: None,
) -> str:
    """Export to `folder`, which appears whole; returns what was checked, as a sentence.

    `tokenizer`: a folder whose files are copied, where there is one. One process calls it; nothing
    else is needed: no GPU, no DeepSpeed. Raises ExportDiffers with both losses, and ConfigError.
    """
    manifest = checkpoint.manifest
    dtype = wish.dtype or manifest.precision
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        config = hf_config(manifest.model_config, wish.source, wish.trust_remote_code)
        model = skeleton(config, DTYPES[dtype], "eager", wish.trust_remote_code)
    except ValueError as error:
        raise ConfigError(f"{checkpoint.path}: {error}") from error
    with replacing(folder) as unfinished:
        if tokenizer.is_dir():
            shutil.copytree(tokenizer, unfinished, dirs_exist_ok=True)
        write_model(unfinished, model, checkpoint.reader(), wish.shard_bytes, progress)
        return _checked(checkpoint, unfinished, dtype, wish)


def _checked(checkpoint: Checkpoint, folder: Path, dtype: str, wish: Wish) -> str:
    expected = checkpoint.manifest.probe_loss
    if not wish.check or expected is None:
        why = "not asked for" if not wish.check else "the checkpoint has no probe"
        return f"its loss was not checked: {why}"
    found = _loss(checkpoint, folder, dtype, wish.trust_remote_code)
    tolerance = max(TOLERANCES[dtype], TOLERANCES[checkpoint.manifest.precision])
    same = math.isclose(found, expected, rel_tol=tolerance)
    if not same and not (math.isnan(found) and math.isnan(expected)):
        raise ExportDiffers(
            f"{checkpoint.path} was saved with a loss of {expected:.7g} on its probe batch, but "
            f"the exported model has {found:.7g} (relative tolerance {tolerance:g}): not exported"
        )
    return f"its probe loss is {found:.6g}, and was {expected:.6g} in training"


@torch.no_grad()
def _loss(checkpoint: Checkpoint, folder: Path, dtype: str, trust_remote_code: bool) -> float:
    """Mean over the probe's targets, one sample at a time."""
    model = opened(folder, DTYPES[dtype], trust_remote_code).eval()
    probe, total = stored_probe(checkpoint), 0.0
    for row in range(len(probe.labels)):
        positions = None if probe.position_ids is None else probe.position_ids[row : row + 1]
        rows = slice(row, row + 1)
        total += forward(model, probe.input_ids[rows], probe.labels[rows], positions)[0].item()
    return total / int((probe.labels != -100).sum())
