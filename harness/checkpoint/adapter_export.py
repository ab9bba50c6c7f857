"""Exports adapters as a folder that peft opens, or the weights that they are added to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from harness.checkpoint.both_readers import rewrite_config
from harness.checkpoint.export import opened
from harness.checkpoint.find import Checkpoint
from harness.checkpoint.fragment import WEIGHT
from harness.errors import ConfigError
from harness.layout.adapters import NAME
from harness.layout.quantization import DESCRIPTION

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
ADAPTERS = "adapters"
"""Their folder, within one of weights that they are added to."""
_PREFIX = "base_model.model."  # of peft's names in its files


def write_adapters(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype) -> None:
    """Write a checkpoint's adapters as peft's `save_pretrained` would."""
    reader = checkpoint.reader()
    tensors = {
        _PREFIX + name.replace(f".{NAME}.", "."): reader.whole(name, WEIGHT).to(dtype)
        for name in reader.by_name
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = {**checkpoint.manifest.adapters, "inference_mode": True}
    _write_json(folder / CONFIG, config)
    if checkpoint.manifest.quantization:
        _write_json(folder / DESCRIPTION, checkpoint.manifest.quantization)


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
