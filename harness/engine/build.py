"""From a Plan to an engine: the model built, partitioned and handed to DeepSpeed."""

from __future__ import annotations

import logging
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations import HfDeepSpeedConfig

from harness.ds_config import offloaded_to
from harness.engine import quirks
from harness.engine.zero import ZeroEngine
from harness.errors import ConfigError
from harness.models.initialize import materialize
from harness.models.skeleton import (
    DTYPES,
    decayed_parameters,
    hf_config,
    separates_documents,
    skeleton,
)
from harness.plan import Plan


def build_engine(
    plan: Plan, device: torch.device, trust_remote_code: bool = False, document_mask: bool = False
) -> ZeroEngine:
    """Build the model that `plan` names and hand it to DeepSpeed.

    Under ZeRO-3 no rank ever holds more than one decoder layer in full. `document_mask`: batches
    will come with document boundaries, which the model must heed.
    Raises ConfigError where the model or its weights do not fit the plan.
    """
    model, decayed, events = _build_model(plan, device, trust_remote_code, document_mask)
    if plan.run.model.checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    config, fallbacks = _with_buildable_optimizer(plan)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=_parameter_groups(model, decayed, plan.run.optim.weight_decay),
        config=config,
    )
    return ZeroEngine(engine, plan, [*events, *fallbacks])


def _build_model(
    plan: Plan, device: torch.device, trust_remote_code: bool, document_mask: bool
) -> tuple[PreTrainedModel, set[str], list[dict[str, Any]]]:
    """The model with its weights on `device`, the names of what decays, and events."""
    logging.getLogger("transformers").setLevel(logging.ERROR)  # else every default is logged twice
    try:
        config = hf_config(plan.model_config, plan.model_source, trust_remote_code)
    except ValueError as error:
        raise ConfigError(f"model.name={plan.run.model.name}: {error}") from error
    dtype = DTYPES[plan.precision]
    try:
        model = skeleton(config, dtype, plan.run.model.attention, trust_remote_code)
    except ValueError as error:  # an attention implementation that the architecture lacks
        raise ConfigError(f"model.attention={plan.run.model.attention}: {error}") from error
    if document_mask:
        _require_document_mask(plan, model)
    decayed = decayed_parameters(model)
    if plan.run.model.init_from is not None:
        model, events = _load_weights(plan, config, dtype, device, trust_remote_code)
        return model, decayed, events
    try:
        materialize(
            model,
            plan.run.train.seed,
            device,
            rank=plan.world.rank,
            world_size=plan.world.world_size,
            send=_send if plan.world.world_size > 1 else None,
            placed=_Partition(plan.deepspeed) if plan.zero_stage == 3 else None,
        )
    except ValueError as error:
        raise ConfigError(f"model.name={plan.run.model.name}: {error}") from error
    return model, decayed, []


def _require_document_mask(plan: Plan, skeleton: PreTrainedModel) -> None:
    """Refuse to train across document boundaries where they were to be kept."""
    model, attention = plan.run.model, plan.run.model.attention
    wish = "tokens attend only within their document (data.document_mask, the default with prompts)"
    if not separates_documents(skeleton):
        raise ConfigError(
            f"model.name={model.name}: {plan.model_config['model_type']} models ignore document "
            f"boundaries, but {wish}: set data.document_mask=false, or take another model"
        )
    if attention.startswith("flash") and plan.micro_batch > 1:
        raise ConfigError(
            f"model.attention={attention} heeds document boundaries in micro-batches of one "
            f"sample only, and {wish}: set train.micro_batch=1, or model.attention=sdpa"
        )


def _load_weights(
    plan: Plan, config: Any, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> tuple[PreTrainedModel, list[dict[str, Any]]]:
    """Read weights from safetensors; transformers partitions them as it reads under ZeRO-3."""
    # Transformers asks a global for the DeepSpeed config; it must live while the model is read.
    zero3 = HfDeepSpeedConfig(plan.deepspeed) if plan.zero_stage == 3 else None
    source = plan.run.model.init_from
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            attn_implementation=plan.run.model.attention,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,  # never a pickle
            output_loading_info=True,
        )
    except (OSError, RuntimeError) as error:  # RuntimeError: shapes that differ
        raise ConfigError(
            f"model.init_from={source}, for model.name={plan.run.model.name}: {error}"
        ) from error
    finally:
        del zero3
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError([f"model.init_from={source} has no weights for {', '.join(missing[:5])}"])
    unused, events = sorted(report["unexpected_keys"]), []
    if unused:
        message = f"{source} also holds weights that the model lacks: {', '.join(unused[:5])}"
        events.append({"kind": "unused_weights", "message": message, "names": unused})
    return (model if plan.zero_stage == 3 else model.to(device)), events


def _send(tensor: torch.Tensor, owner_rank: int) -> None:
    dist.broadcast(tensor.view(torch.uint8), owner_rank)


class _Partition:
    """Cuts the parameters of one piece after the other into ZeRO-3 partitions."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.first: nn.Parameter | None = None

    def __call__(self, parameters: list[nn.Parameter]) -> None:
        if self.first is None:
            deepspeed.zero.Init(
                module=nn.ParameterList(parameters), config_dict_or_path=self.config
            )
            self.first = parameters[0]
        else:
            self.first.convert_to_zero_parameters(param_list=parameters)


def _parameter_groups(
    model: nn.Module, decayed: set[str], weight_decay: float
) -> list[dict[str, Any]]:
    """Two optimizer groups: matrices that decay; biases, norms and embeddings that do not."""
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in trainable if n in decayed], "weight_decay": weight_decay},
        {"params": [p for n, p in trainable if n not in decayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _with_buildable_optimizer(plan: Plan) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The resolved JSON, with torch's Adam where DeepSpeed's cannot be compiled, and the event.

    Raises ConfigError for CPU offload without a compiler: only DeepSpeed's CPU Adam steps there.
    """
    config = plan.deepspeed
    optimizer = config["optimizer"]
    if optimizer["type"] not in ("Adam", "AdamW") or "torch_adam" in optimizer["params"]:
        return config, []
    offloaded = offloaded_to(config, "optimizer") != "none"
    lacking = quirks.compiled_adam_available("cpu" if offloaded else plan.world.accelerator)
    if lacking is None:
        return config, []
    if offloaded:
        raise ConfigError(
            f"zero_optimization.offload_optimizer needs DeepSpeed's compiled CPU Adam, but "
            f"{lacking}; install a C++ compiler and ninja (apt install g++ ninja-build), or "
            f"remove offload_optimizer"
        )
    event = {"kind": "fallback", "what": "torch Adam instead of DeepSpeed's", "why": lacking}
    return quirks.with_torch_adam(config), [event]
