"""A Hugging Face decoder without weights: parameters on the meta device, real buffers."""

from math import prod
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from harness.layout.optimizer_table import Parameter
from harness.models import recurrent

recurrent.register()
_LARGE = 2**28  # elements; more than any buffer has
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def hf_config(
    model_config: dict[str, Any], source: str | None = None, trust_remote_code: bool = False
) -> PretrainedConfig:
    """Return the transformers config object for a `config.json` dict.

    `source` (a folder or hub id) is read only for architectures with their own code, which runs
    only with `trust_remote_code`. Raises ValueError for an unknown `model_type` and for
    inconsistent sizes.
    """
    values = _with_floats(model_config)  # copied: transformers writes rope_theta into rope_scaling
    del values["model_type"]
    if "auto_map" in values and source:
        values.pop("auto_map")
        try:
            config: PretrainedConfig = AutoConfig.from_pretrained(
                source, trust_remote_code=trust_remote_code, **values
            )
        except ValueError as error:
            if "trust_remote_code" not in str(error):
                raise
            why = "it comes with its own code, which --trust-remote-code runs"
            raise ValueError(why) from error
        return config
    try:
        made: PretrainedConfig = AutoConfig.for_model(model_config["model_type"], **values)
    except StrictDataclassError as error:
        raise ValueError(str(error.__cause__ or error)) from error
    text = made.get_text_config(decoder=True)
    pad, rows = getattr(text, "pad_token_id", None), getattr(text, "vocab_size", None)
    if isinstance(pad, int) and isinstance(rows, int) and pad >= rows:
        raise ValueError(
            f"pad_token_id is {pad}, which must be less than vocab_size, {rows}: set "
            "model.overrides.pad_token_id"
        )
    return made


def _with_floats(value: Any) -> Any:
    """Return a copy with transformers' notation for non-finite numbers replaced by floats."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_floats(item) for key, item in value.items()}
    return [_with_floats(item) for item in value] if isinstance(value, list) else value


class _LargeOnMeta(TorchFunctionMode):
    """Creates large empty tensors on the meta device. accelerate moves each parameter there only
    after creating it, and the 256 experts of a DeepSeek-V3 layer would take 28 GiB until then.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and args:
            sizes = args[0] if isinstance(args[0], (list, tuple, torch.Size)) else args
            if prod(sizes) >= _LARGE:
                kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def skeleton(
    config: PretrainedConfig,
    dtype: torch.dtype,
    attention: str = "sdpa",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Build the model class that `config` names, with every parameter on the meta device.

    Buffers are real and hold what transformers computes (rotary frequencies, scales); weights drawn
    or loaded later do not touch them. Tied parameters are one object.
    """
    with no_init_weights(), init_empty_weights(include_buffers=False), _LargeOnMeta():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code
        )
    model.tie_weights()  # init_empty_weights creates a new Parameter at each registration
    return model


def tied_names(
    model_config: dict[str, Any], source: str | None, trust_remote_code: bool
) -> dict[str, str]:
    """Return the names of tied weights, each with the name of the weight it shares. Raises
    ValueError as `hf_config` does.
    """
    config = hf_config(model_config, source, trust_remote_code)
    model = skeleton(config, torch.float32, "eager", trust_remote_code)
    first = dict[int, str]()
    names = model.named_parameters(remove_duplicate=False)
    pairs = [(name, first.setdefault(id(parameter), name)) for name, parameter in names]
    return {name: other for name, other in pairs if name != other}


def described_parameters(model: PreTrainedModel) -> list[Parameter]:
    """Return the properties of a skeleton's parameters that determine their optimizer groups.

    Weight decay applies to matrices and to the stacked matrices of experts, but not to biases,
    norms and embeddings (or a head tied to an embedding).
    """
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    head = getattr(model.get_output_embeddings(), "weight", None)
    return [
        Parameter(name, matrix=p.ndim >= 2 and id(p) not in embeddings, head=p is head)
        for name, p in model.named_parameters()
    ]
