"""Opens the models that runs export."""

import json
from pathlib import Path
from typing import Any

from harness.errors import ConfigError
from harness.files.paths import script
from harness.layout.adapters import DESCRIPTION
from harness.layout.code_exports import ATTENTION
from harness.runfolder import RunFolder

ADAPTERS, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def export_of(run: Path) -> tuple[Path, str | None]:
    """Return the exported model of a run, or the folder itself, and the run's initial weights.

    Raises ConfigError for a folder that is neither, and for a run without an export.
    """
    folder = RunFolder(run)
    if not folder.plan_path.is_file():
        if not any((run / name).is_file() for name in ("config.json", ADAPTERS)):
            raise ConfigError(f"{run} is neither a run nor an exported model")
        return run, None
    if not folder.export_dir.is_dir():
        raise ConfigError(f"{run} has no export yet: python {script('tools/export_hf.py')} {run}")
    plan = folder.read_plan() or {}
    return folder.export_dir, plan.get("run", {}).get("model", {}).get("init_from")


def opened(source: Path | str, trust_remote_code: bool, beside: Path | None = None) -> Any:
    """Return a model in the precision of its files, on a GPU if there is one, that computes as in
    training. `beside` is a folder of adapters: the model gets their 4-bit weights and attention.

    Raises ConfigError if it cannot be opened.
    """
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from transformers.utils import logging

    from harness.models import recurrent
    from harness.models.as_trained import attend_as_trained
    from harness.models.export_code import opened_as_trained

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    recurrent.register()
    description = beside and beside / DESCRIPTION
    settings: dict[str, Any] = {"dtype": "auto"}
    if description and description.is_file():
        quantization = BitsAndBytesConfig.from_dict(json.loads(description.read_text()))
        dtype = quantization.bnb_4bit_compute_dtype
        settings = {"dtype": dtype, "quantization_config": quantization}
    try:
        model = opened_as_trained(Path(source), **settings)
        if model is None:
            model = AutoModelForCausalLM.from_pretrained(
                source, trust_remote_code=trust_remote_code, **settings
            )
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(f"{source} cannot be opened: {error}") from error
    attention = beside and beside / f"{ATTENTION}.json"
    if attention and attention.is_file():
        attend_as_trained(model, json.loads(attention.read_text()))
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # only for row counts divisible by 32
            module.support_avx512bf16_for_cpu = False
    if "quantization_config" in settings:  # already on its device
        return model.eval()
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
