"""A Hugging Face decoder without its weights: parameters on meta, buffers real."""

from __future__ import annotations

import copy
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    masking_utils,
)
from transformers.initialization import no_init_weights

from harness.layout.optimizer_table import Parameter

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def hf_config(
    model_config: dict[str, Any], source: str | None = None, trust_remote_code: bool = False
) -> PretrainedConfig:
    """Make the transformers config object of a `config.json` dict.

    `source` (a folder or hub id) is read only for architectures that bring their own code; that
    code runs only with `trust_remote_code`.
    Raises ValueError for a `model_type` that transformers does not know and sizes that do not fit.
    """
    values = copy.deepcopy(model_config)  # transformers writes rope_theta into its rope_scaling
    del values["model_type"]
    if "auto_map" in values and source:
        values.pop("auto_map")
        config: PretrainedConfig = AutoConfig.from_pretrained(
            source, trust_remote_code=trust_remote_code, **values
        )
        return config
    try:
        return AutoConfig.for_model(model_config["model_type"], **values)
    except StrictDataclassError as error:
        raise ValueError(str(error.__cause__ or error)) from error


def skeleton(
    config: PretrainedConfig,
    dtype: torch.dtype,
    attention: str = "sdpa",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Build the model class that `config` names, with every parameter on the meta device.

    Buffers are real and hold what transformers computes (rotary frequencies, scales): the
    weights that follow, drawn or loaded, never touch them. Tied parameters are one object.
    """
    with no_init_weights(), init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=trust_remote_code,
        )
    model.tie_weights()  # init_empty_weights makes a new Parameter at every registration
    return model


class _AskedForDocuments(Exception):
    """Raised where transformers looks for document boundaries."""


def separates_documents(model: PreTrainedModel) -> bool:
    """Return whether a skeleton's attention reads document boundaries from `position_ids`.

    Some architectures take no positions, or leave them out of their mask: OPT, Falcon, BLOOM.
    """

    def asked(*args: Any, **kwargs: Any) -> None:
        raise _AskedForDocuments

    ids = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    positions = torch.tensor([[0, 1, 0, 1]], device="meta")
    original, masking_utils.find_packed_sequence_indices = (
        masking_utils.find_packed_sequence_indices,
        asked,
    )
    try:
        model(input_ids=ids, position_ids=positions, use_cache=False)
    except _AskedForDocuments:
        return True
    except Exception:  # whatever tensors without values lead to: the mask was made before
        return False
    finally:
        masking_utils.find_packed_sequence_indices = original
    return False


def described_parameters(model: PreTrainedModel) -> list[Parameter]:
    """Return the properties of every parameter that decide its optimizer group. Needs a skeleton.

    Matrices decay, and the stacked matrices of experts; not biases, norms and embeddings (nor a
    head that is tied to an embedding).
    """
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    head = getattr(model.get_output_embeddings(), "weight", None)
    return [
        Parameter(name, matrix=p.ndim >= 2 and id(p) not in embeddings, head=p is head)
        for name, p in model.named_parameters()
    ]
