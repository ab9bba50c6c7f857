"""Builds a model without pipeline stages: every rank has each layer, in full or ZeRO-3 shards."""

from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from harness.engine.deepspeed_0_19.internals import partition_like
from harness.engine.groups import ModelParallelUnit, sender
from harness.engine.processes import raising_together
from harness.engine.reading import (
    Event,
    PieceReader,
    check_files,
    check_report,
    config_of_files,
    read_weights,
)
from harness.models.initialize import Cut, materialize, move_buffers
from harness.plan.plan import Plan


def build_single_stage(
    plan: Plan,
    empty: PreTrainedModel,
    device: torch.device,
    trust_remote_code: bool,
    blank: bool,
    unit: ModelParallelUnit | None = None,
    cut: Cut | None = None,
) -> tuple[PreTrainedModel, list[Event]]:
    """Return the model on `device`, initialised in `empty` or loaded, and events. With `blank`,
    weights are zeros. `cut` makes this rank's slice of each weight. Collective.

    Raises ConfigError if weights cannot be initialised or do not fit.
    """
    reads = plan.config.model.init_from is not None and not blank
    if reads and cut is None and config_of_files(plan, empty) is None:
        return _load_together(plan, empty, device, trust_remote_code)
    reader = PieceReader(plan, empty, trust_remote_code) if reads else None
    if reader is not None:
        check_files(plan, empty)
    placed = _Partition(plan.deepspeed, unit) if plan.zero_stage == 3 else None
    with raising_together(f"model.name={plan.config.model.name}"):
        materialize_share(empty, plan, device, blank, cut, reader, placed)
    return empty, reader.events() if reader else []


def materialize_share(
    model: PreTrainedModel,
    plan: Plan,
    device: torch.device,
    blank: bool,
    cut: Cut | None,
    reader: PieceReader | None,
    placed: Callable[[list[nn.Parameter]], None] | None = None,
) -> None:
    """Fill this rank's weights; replicas initialise or read them in turn. Collective."""
    replicas = plan.share.ranks("replicas")
    materialize(
        model,
        None if blank else plan.config.train.seed,
        device,
        init=plan.config.model.init,
        rank=replicas.index(plan.share.rank),
        world_size=len(replicas),
        send=sender(plan.share),
        placed=placed,
        cut=cut,
        read=reader,
    )


def _load_together(
    plan: Plan, empty: PreTrainedModel, device: torch.device, trust_remote_code: bool
) -> tuple[PreTrainedModel, list[Event]]:
    """Call `_load`; raise one rank's ConfigError on all, as nodes may see different files."""
    check_files(plan, empty)
    if plan.zero_stage == 3:  # reading is collective: the others wait within it, not below
        return _load(plan, empty, device, trust_remote_code)
    with raising_together():
        return _load(plan, empty, device, trust_remote_code)


def _load(
    plan: Plan, empty: PreTrainedModel, device: torch.device, trust_remote_code: bool
) -> tuple[PreTrainedModel, list[Event]]:
    """Read weights from safetensors; under ZeRO-3 transformers partitions them while reading."""
    # transformers finds the DeepSpeed config in a weak global: keep it alive while reading.
    zero3 = HfDeepSpeedConfig(plan.deepspeed) if plan.zero_stage == 3 else None
    try:
        model, report = read_weights(AutoModelForCausalLM, plan, empty, trust_remote_code)
    finally:
        del zero3
    events = check_report(plan, report["missing_keys"], report["unexpected_keys"])
    for name, parameter in empty.named_parameters():
        if not parameter.requires_grad:  # transformers sets it for all that it reads
            model.get_parameter(name).requires_grad_(False)
    if plan.zero_stage == 3:
        # zero.Init has moved the parameters; neither it nor DeepSpeed's engine moves buffers.
        move_buffers(model, device)
        return model, events
    return nn.Module.to(model, device), events


class _Partition:
    """Partitions parameters for ZeRO-3, one piece of the model at a time."""

    def __init__(self, config: dict[str, Any], unit: ModelParallelUnit | None) -> None:
        self.config, self.unit = config, unit
        self.first: nn.Parameter | None = None

    def __call__(self, parameters: list[nn.Parameter]) -> None:
        if self.first is None:
            deepspeed.zero.Init(
                module=nn.ParameterList(parameters),
                config_dict_or_path=self.config,
                mpu=self.unit,
                data_parallel_group=self.unit and self.unit.data_group,
            )
            self.first = parameters[0]
        else:
            partition_like(self.first, parameters)
