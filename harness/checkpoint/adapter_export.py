"""Exports adapters as a folder that peft opens, or the weights that they are added to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, PreTrainedModel

from harness.checkpoint.both_readers import rewrite_config
from harness.checkpoint.export import opened
from harness.checkpoint.find import Checkpoint
from harness.checkpoint.fragment import WEIGHT
from harness.errors import ConfigError
from harness.layout.adapters import NAME, module_of
from harness.layout.quantization import DESCRIPTION

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
ADAPTERS = "adapters"
"""Their folder, within one of weights that they are added to."""
_PREFIX = "base_model.model."  # of peft's names in its files


def write_adapters(
    checkpoint: Checkpoint,
    folder: Path,
    dtype: torch.dtype,
    tied: Mapping[str, str],
    beside: Mapping[str, torch.Tensor],
) -> None:
    """Write a checkpoint's adapters as peft's `save_pretrained` would. `tied`: names of weights
    that are another's, with that one's. `beside`: weights that belong to the adapters, as no file
    of their base has them.
    """
    reader, manifest = checkpoint.reader(), checkpoint.manifest
    tensors = {name: reader.whole(name, WEIGHT).to(dtype) for name in reader.by_name}
    config = {**manifest.adapters, "inference_mode": True}
    if config.get("modules_to_save"):
        # peft gives a module that is saved a weight of its own, also where two were one.
        copies = {copy: tensors[name].clone() for copy, name in tied.items() if name in tensors}
        tensors |= copies
        own = [*config["modules_to_save"], *map(module_of, copies)]
        config["modules_to_save"] = [*dict.fromkeys(own)]
    tensors |= {name: t.to(dtype) for name, t in beside.items() if name not in tensors}
    named = {_PREFIX + name.replace(f".{NAME}.", "."): t for name, t in tensors.items()}
    save_file(named, folder / WEIGHTS, metadata={"format": "pt"})
    _write_json(folder / CONFIG, config)
    if manifest.quantization:
        _write_json(folder / DESCRIPTION, manifest.quantization)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def base_of(checkpoint: Checkpoint, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """Return the model that a checkpoint's adapters belong to, with the weights of its files.

    Raises ConfigError where it cannot be opened.
    """
    base = checkpoint.manifest.adapters["base_model_name_or_path"]
    try:
        return opened(Path(base), dtype, trust_remote_code)
    except (OSError, ValueError) as error:
        problem = f"the weights that the adapters belong to cannot be opened: {error}"
        raise ConfigError(f"{base}: {problem}") from error


def rows_of_base(checkpoint: Checkpoint, trust_remote_code: bool) -> int | None:
    """Return the rows of the vocabulary of the model that a checkpoint's adapters belong to; None
    if it is not here.
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
    """Return the base model with the exported adapters of `folder` beside its weights."""
    from peft import PeftModel

    return PeftModel.from_pretrained(base, str(folder))


@torch.no_grad()
def merged(model: Any, folder: Path) -> PreTrainedModel:
    """Write the weights with the adapters added to them to `folder`; return that model."""
    whole: PreTrainedModel = model.merge_and_unload()
    whole.save_pretrained(folder)
    rewrite_config(folder, whole.config, {})
    return whole
