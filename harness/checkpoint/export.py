"""Exports a model to a folder that from_pretrained or peft can open."""

import contextlib
import fcntl
import glob
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import logging

from harness.checkpoint.hub_layout import HubLayout, rewrite_config, write_json
from harness.checkpoint.index import BUFFER, WEIGHT
from harness.checkpoint.manifest import Checkpoint
from harness.checkpoint.reader import Reader
from harness.checkpoint.store import fsync
from harness.checkpoint.tensor_file import TensorWriter
from harness.errors import CannotSave, ConfigError, is_full_disk
from harness.estimate.memory_item import as_size
from harness.files.paths import export_problem
from harness.layout.adapters import DESCRIPTION, NAME, module_of, quiet_bitsandbytes

SHARD_BYTES = 4 * 10**9
_LOCK, _REPLACED = ".lock", "replaced"
Progress = Callable[[int, int], None]  # (bytes written, total bytes)


@contextlib.contextmanager
def replacing(folder: Path, is_export: bool = True) -> Iterator[Path]:
    """Yield a new folder that is renamed to `folder` at the end, or removed after an error.

    Raises ConfigError if `folder` cannot be created or, with `is_export`, if it exists and is not
    an export.
    """
    if is_export and (problem := export_problem(folder)):
        raise ConfigError(problem)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix=_unfinished(folder), dir=folder.parent))
    except OSError as error:
        if is_full_disk(error):
            raise
        raise ConfigError(f"{folder} cannot be created ({error}): choose another folder") from error
    try:
        with _locked(place):
            unfinished = place / folder.name
            unfinished.mkdir()
            yield unfinished
            for path in (*unfinished.rglob("*"), unfinished):
                fsync(path)
            with _out_of_the_way(folder, place / _REPLACED):
                unfinished.rename(folder)
            fsync(folder.parent)
    finally:
        shutil.rmtree(place, ignore_errors=True)  # a read-only disk must not hide the first error


def sweep(folder: Path, alone: bool = False) -> list[Path]:
    """Remove leftovers of processes that were killed in `replacing`; return their paths.

    If a process was killed between its two renames, the old folder gets its name back. `alone`: no
    other process can be in `replacing` now; otherwise leftovers of other hosts are kept, because
    their processes may still run.
    """
    prefix, removed = _unfinished(folder), []
    for place in sorted(folder.parent.glob(f"{glob.escape(prefix)}*")):
        is_another_folders = "-" in place.name.removeprefix(prefix)
        if is_another_folders or not (alone or _is_dead(place)):
            continue
        if not folder.exists():
            with contextlib.suppress(OSError):
                (place / _REPLACED).rename(folder)
        shutil.rmtree(place, ignore_errors=True)
        removed.append(place)
    return removed


@contextlib.contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Hold a lock in `place` that is released whenever this process ends."""
    with (place / _LOCK).open("x") as lock:
        lock.write(socket.gethostname())
        lock.flush()
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _is_dead(place: Path) -> bool:
    """Return True if `place` was created by a process of this host that has ended."""
    try:
        with (place / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return socket.gethostname() == lock.read()
    except OSError:  # the process is alive or starting, or the file system has no locks
        return False


def _unfinished(folder: Path) -> str:
    return f".unfinished-{folder.name}-"


def write_model(
    folder: Path,
    model: PreTrainedModel,
    reader: Reader,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = lambda done, total: None,
    source: Mapping[str, Any] | None = None,
) -> list[str]:
    """Write a checkpoint's config and weights as the model's `save_pretrained` would. Return notes.

    `model` has its parameters on meta, in the dtype to write. `source`: the config.json of its
    initial weights. Memory use is limited to a chunk of a tensor, or to the few tensors that are
    converted together. Raises CannotSave if there is not enough space.
    """
    layout = HubLayout(model, piece_bytes=shard_bytes // 8)
    split = split_torch_state_dict_into_shards(
        layout.tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=shard_bytes
    )
    total, free = sum(t.nbytes for t in layout.tensors.values()), shutil.disk_usage(folder).free
    if total > free:
        raise CannotSave(f"the export needs {as_size(total)}, but only {as_size(free)} are free")
    notes = _write_config(folder, model, source or {})
    files = {
        file: TensorWriter(folder / file, {name: layout.tensors[name] for name in names})
        for file, names in split.filename_to_tensors.items()
    }
    buffers, done = dict(model.named_buffers()), 0

    def read(name: str, offset: int, out: torch.Tensor) -> None:
        reader.fill(name, BUFFER if name in buffers else WEIGHT, offset, out)

    for name, offset, piece in layout.pieces(read):
        files[split.tensor_to_filename[name]].write(name, offset, piece)
        done += piece.nbytes
        progress(done, total)
    for file in files.values():
        file.close()
    if split.is_sharded:
        metadata = {"total_parameters": model.num_parameters(), **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / "model.safetensors.index.json", index)
    return notes


def _write_config(folder: Path, model: PreTrainedModel, source: Mapping[str, Any]) -> list[str]:
    """Write a config that transformers 4 and 5 read; return notes. The model's own
    `save_pretrained` is not used, because it imports DeepSpeed if that is installed.
    """
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    if model.is_remote_code():
        config: Any = model.config  # transformers declares a dict, and passes the object itself
        custom_object_save(model, folder, config=config)
    model.config.save_pretrained(folder)
    notes = rewrite_config(folder, model.config, source)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    return notes


def opened(folder: Path, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return the model in a folder, loaded by transformers; quantized weights are dequantized."""
    logging.disable_progress_bar()
    how: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    config = AutoConfig.from_pretrained(folder, **how)
    if quantization := getattr(config, "quantization_config", None):
        config.quantization_config = {**quantization, "dequantize": True}
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype, **how)


@contextlib.contextmanager
def _out_of_the_way(folder: Path, aside: Path) -> Iterator[None]:
    """Rename `folder` to `aside`; rename it back if nothing takes its place."""
    try:
        if folder.exists():
            folder.rename(aside)
        yield
    except BaseException:
        if aside.exists() and not folder.exists():
            aside.rename(folder)
        raise


WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
ADAPTERS = "adapters"
"""Subfolder for adapters in an export whose weights they were merged into."""
_PREFIX = "base_model.model."  # prefix of the names in peft's files


def write_adapters(
    checkpoint: Checkpoint,
    folder: Path,
    dtype: torch.dtype,
    tied: Mapping[str, str],
    beside: Mapping[str, torch.Tensor],
) -> None:
    """Write a checkpoint's adapters as peft's `save_pretrained` would.

    `tied` maps the name of each tied copy to that of its weight. `beside`: weights that the base
    model's files lack and that must therefore accompany the adapters.
    """
    reader, manifest = Reader.of(checkpoint), checkpoint.manifest
    names = [name for name in reader.index if WEIGHT in reader.index.kinds(name)]  # not buffers
    tensors = {name: reader.whole(name, WEIGHT).to(dtype) for name in names}
    config = {**manifest.adapters, "inference_mode": True}
    if config.get("modules_to_save"):
        # peft saves a separate weight for each saved module, even for tied ones.
        copies = {copy: tensors[name].clone() for copy, name in tied.items() if name in tensors}
        tensors |= copies
        own = [*config["modules_to_save"], *map(module_of, copies)]
        config["modules_to_save"] = [*dict.fromkeys(own)]
    tensors |= {name: t.to(dtype) for name, t in beside.items() if name not in tensors}
    named = {_PREFIX + name.replace(f".{NAME}.", "."): t for name, t in tensors.items()}
    save_file(named, folder / WEIGHTS, metadata={"format": "pt"})
    write_json(folder / CONFIG, config, ascii=True)  # peft reads it in the locale's encoding
    if manifest.quantization:
        write_json(folder / DESCRIPTION, manifest.quantization)


def base_of(checkpoint: Checkpoint, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """Return the base model of a checkpoint's adapters, with the weights of its files.

    Raises ConfigError if it cannot be opened.
    """
    base = checkpoint.manifest.adapters["base_model_name_or_path"]
    try:
        return opened(Path(base), dtype, trust_remote_code)
    except (OSError, ValueError) as error:
        problem = f"the base model of the adapters cannot be opened: {error}"
        raise ConfigError(f"{base}: {problem}") from error


def rows_of_base(checkpoint: Checkpoint, trust_remote_code: bool) -> int | None:
    """Return the vocabulary size of the base model of a checkpoint's adapters; None if its files
    are not available.
    """
    base = checkpoint.manifest.adapters["base_model_name_or_path"]
    try:
        config = AutoConfig.from_pretrained(
            base, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError):
        return None
    return getattr(config.get_text_config(decoder=True), "vocab_size", None)


def adapted(folder: Path, base: PreTrainedModel) -> Any:
    """Return the base model with the exported adapters of `folder`."""
    quiet_bitsandbytes()
    from peft import PeftModel

    return PeftModel.from_pretrained(base, str(folder))


@torch.no_grad()
def merged(model: Any, folder: Path) -> PreTrainedModel:
    """Merge the adapters into the weights, write the model to `folder` and return it."""
    whole: PreTrainedModel = model.merge_and_unload()
    whole.save_pretrained(folder)
    rewrite_config(folder, whole.config, {})
    return whole
