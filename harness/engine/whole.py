"""A model whose every layer is on every rank, in full or in shares of ZeRO-3."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import deepspeed
import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from harness.engine.deepspeed_0_19.internals import partition_like
from harness.engine.groups import sender
from harness.engine.processes import raise_together
from harness.errors import ConfigError
from harness.models.initialize import materialize, move_buffers
from harness.plan.plan import Plan
from harness.plan.weights import weight_file_problems

Event = dict[str, Any]


def build_whole(
    plan: Plan,
    empty: PreTrainedModel,
    device: torch.device,
    trust_remote_code: bool,
    blank: bool,
) -> tuple[PreTrainedModel, list[Event]]:
    """The model with its weights on `device`, drawn into `empty` or loaded, and events; zeros where
    it is to be `blank`.

    Raises ConfigError where weights cannot be drawn or do not fit.
    """
    if plan.config.model.init_from is not None and not blank:
        return _load_together(plan, empty, device, trust_remote_code)
    problem, share = None, plan.share
    replicas = share.ranks("replicas")
    try:
        materialize(
            empty,
            None if blank else plan.config.train.seed,
            device,
            rank=replicas.index(share.rank),
            world_size=len(replicas),
            send=sender(share),
            placed=_Partition(plan.deepspeed) if plan.zero_stage == 3 else None,
        )
    except ValueError as error:
        problem = f"model.name={plan.config.model.name}: {error}"
    raise_together(problem)
    return empty, []


def _load_together(
    plan: Plan, empty: PreTrainedModel, device: torch.device, trust_remote_code: bool
) -> tuple[PreTrainedModel, list[Event]]:
    """`_load`; one rank's ConfigError is everybody's. Nodes may see other files."""
    check_files(plan, empty)
    loaded, problem = None, None
    try:
        loaded = _load(plan, empty, device, trust_remote_code)
    except ConfigError as error:
        problem = str(error)
    raise_together(problem)
    assert loaded is not None
    return loaded


def _load(
    plan: Plan, empty: PreTrainedModel, device: torch.device, trust_remote_code: bool
) -> tuple[PreTrainedModel, list[Event]]:
    """Read weights from safetensors; transformers partitions them as it reads under ZeRO-3."""
    # Transformers asks a global for the DeepSpeed config; it must live while the model is read.
    zero3 = HfDeepSpeedConfig(plan.deepspeed) if plan.zero_stage == 3 else None
    try:
        model, report = read_weights(AutoModelForCausalLM, plan, empty, trust_remote_code)
    finally:
        del zero3
    events = check_report(plan, report["missing_keys"], report["unexpected_keys"])
    if plan.zero_stage == 3:
        # zero.Init has placed the parameters; neither it nor DeepSpeed's engine moves buffers.
        move_buffers(model, device)
        return model, events
    return nn.Module.to(model, device), events


def check_files(plan: Plan, empty: PreTrainedModel) -> None:
    """Raise ConfigError on all ranks for what one of them finds in the files of model.init_from.

    Before anything is read: under ZeRO-3 ranks talk to each other while they read. The plan has
    looked, too; but these are the files that are opened next.
    """
    source = plan.config.model.init_from
    assert source is not None
    named = getattr(empty.config, "transformers_weights", None)
    raise_together("; ".join(weight_file_problems(source, named, opens=True)) or None)


def read_weights(
    model_class: Any, plan: Plan, empty: PreTrainedModel, trust_remote_code: bool
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """`model_class` with the weights of model.init_from, and transformers' report on them.

    Raises ConfigError where they cannot be read or have other shapes.
    """
    source = plan.config.model.init_from
    try:
        model, report = model_class.from_pretrained(
            source,
            config=empty.config,
            dtype=empty.dtype,
            attn_implementation=plan.config.model.attention,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,  # never a pickle
            output_loading_info=True,
        )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        # RuntimeError: shapes that differ.
        raise ConfigError(
            f"model.init_from={source}, for model.name={plan.config.model.name}: {error}"
        ) from error
    empty.generation_config = model.generation_config  # stages have `empty` for the whole model
    return model, report


def check_report(plan: Plan, missing: Iterable[str], unexpected: Iterable[str]) -> list[Event]:
    """An event for weights that nobody needs. Raises ConfigError for weights that are not there."""
    source = plan.config.model.init_from
    missing_names, unused = sorted(missing), sorted(unexpected)
    if missing_names:
        names = ", ".join(missing_names[:5])
        raise ConfigError(f"model.init_from={source} has no weights for {names}")
    if not unused:
        return []
    message = f"{source} also holds weights that the model lacks: {', '.join(unused[:5])}"
    return [{"kind": "unused_weights", "message": message, "names": unused}]


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
            partition_like(self.first, parameters)
