"""Writes an imported checkpoint as one of this harness."""

import json
import shutil
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from harness.checkpoint.export import replacing
from harness.checkpoint.index import INDEX, Entry, Index, to_index
from harness.checkpoint.manifest import MANIFEST, Manifest, TrainState, Written
from harness.checkpoint.store import Store, verified
from harness.checkpoint.tensor_file import write_bytes, write_fragments
from harness.data.tokenizer_files import copy_tokenizer
from harness.errors import ConfigError
from harness.runfolder import RunFolder
from tools.importing.native import Native, Source


def import_checkpoint(source: Source, run: RunFolder) -> Path:
    """Write the content of `source` to the run's checkpoints; return the new one, verified.

    Raises Unusable if the source is incomplete or unsafe, and ConfigError if the step exists.
    """
    native, store = Native(source.engine), Store(run.checkpoints_dir)
    manifest = _manifest(source, native)
    step = manifest.state.step
    if store.at(step).exists():
        raise ConfigError(f"{store.at(step)} exists: choose another --out")
    store.make_unfinished(step)
    folder = store.unfinished(step)
    try:
        _write(folder, native, manifest)
        if any(source.path.glob("tokenizer*")) and not run.tokenizer_dir.exists():
            with replacing(run.tokenizer_dir) as unfinished:
                copy_tokenizer(source.path, unfinished)
        path = store.publish(step)  # last: if killed before this, the same command starts over
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    verified(path)
    return path


def _write(folder: Path, native: Native, manifest: Manifest) -> None:
    """Write all files, the manifest last. One rank's tensors are read at a time."""
    files: list[Written] = []
    entries: list[Entry] = []
    for number, fragments in enumerate(native.by_rank()):
        written, here = write_fragments(folder, number, fragments)
        files, entries = [*files, *written], [*entries, *here]
    index = to_index(entries)
    Index(index, native.folder).check()  # the only check that counts frozen weights
    files.append(write_bytes(folder / INDEX, json.dumps(index).encode()))
    write_bytes(folder / MANIFEST, replace(manifest, files=files).to_bytes())


def _manifest(source: Source, native: Native) -> Manifest:
    counters = native.scalars["counters"]
    return Manifest(
        state=TrainState(counters["global_steps"], counters["global_samples"]),
        precision=native.precision,
        model_config=source.model_config,
        data_fingerprint=None,
        engine=native.scalars,
        probe_loss=None,
        held_out_loss=None,
        about={
            "imported_from": str(source.path.resolve()),
            "world_size": native.ranks,
            "zero_stage": native.stage,
            "versions": {name: version(name) for name in ("torch", "transformers")},
        },
    )
