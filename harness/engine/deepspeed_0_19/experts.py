"""Makes DeepSpeed handle experts that are split over data-parallel ranks.

DeepSpeed knows only the experts of its own layers. ZeRO 1 and 2 recognise an expert parameter by
two attributes, look up its groups by name in two globals, and do both only if the model contains a
module of DeepSpeed's MoE class. ZeRO 3 uses three other attributes and rejects that class.
"""

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from torch import nn

_MARKER = "_has_experts"


class Marker(MoE):  # type: ignore[misc]  # which has no types
    """A module of DeepSpeed's MoE class without parameters; it is never called."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.num_experts = 1

    def set_deepspeed_parallelism(self, *_: Any, **__: Any) -> None:
        """Do nothing: the groups exist already."""


def group_name(ranks: int) -> str:
    """Return the name of expert groups of this size; DeepSpeed parses the size from it."""
    return f"ep_size_{ranks}"


def mark_expert(parameter: Any, zero_stage: int, ranks: int, replicas: dist.ProcessGroup) -> None:
    """Make DeepSpeed reduce and shard a parameter over the `replicas` of its experts, before it is
    partitioned. `ranks`: the number of ranks that together hold all experts.
    """
    if zero_stage == 3:
        parameter.ds_zero_placement_family = "autoep_expert"
        parameter.ds_zero_partition_group_name = group_name(ranks)
        parameter.ds_zero_partition_process_group = replicas
    else:
        parameter.allreduce, parameter.group_name = False, group_name(ranks)


def is_expert(parameter: nn.Parameter) -> bool:
    """Return True if `mark_expert` has marked a parameter."""
    return any(
        hasattr(parameter, name) for name in ("allreduce", "ds_zero_partition_process_group")
    )


def announce_experts(
    model: nn.Module,
    zero_stage: int,
    experts: dist.ProcessGroup,
    replicas: dist.ProcessGroup,
    parts: dist.ProcessGroup,
) -> None:
    """Register the expert groups of a model in DeepSpeed, before its engine is built.

    `parts`: the ranks that hold all slices of a layer's experts; more than `experts` if tensor
    parallelism also splits their width. ZeRO 3 sums the norm over them. BF16_Optimizer sums it over
    tensor ranks and then over experts, if a global says that there are several.
    """
    name = group_name(experts.size())
    groups.expert_tensor_parallel_world_size = parts.size() // experts.size()
    for table, group in (
        (groups._EXPERT_PARALLEL_GROUP, parts if zero_stage == 3 else experts),
        (groups._EXPERT_DATA_PARALLEL_GROUP, replicas),
    ):
        table.clear()
        table[name] = group
    if zero_stage < 3:
        model.add_module(_MARKER, Marker())


def expert_groups(
    optimizer_groups: Iterable[dict[str, Any]], zero_stage: int
) -> list[dict[str, Any]]:
    """Split the groups into groups with only experts or none, named as DeepSpeed requires."""
    split = []
    for number, group in enumerate(optimizer_groups):
        named = list(zip(group["names"], group["params"], strict=True))
        for experts in (False, True):
            chosen = [(n, p) for n, p in named if is_expert(p) == experts]
            if not chosen:
                continue
            names, parameters = zip(*chosen, strict=True)
            part = {**group, "names": list(names), "params": list(parameters)}
            if zero_stage < 3:
                part["name"] = parameters[0].group_name if experts else f"group_{number}"
                part["moe"] = experts
            split.append(part)
    return split
