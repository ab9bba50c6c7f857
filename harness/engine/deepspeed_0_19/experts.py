"""Facts that DeepSpeed has to be told of experts that are divided over data ranks.

It knows experts of its own layers alone. ZeRO 1 and 2 take a parameter for one by two attributes,
find its groups by name in two globals, and ask for either only if the model has a module of
DeepSpeed's class. ZeRO 3 takes three other attributes, and refuses that class.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from torch import nn

_MARKER = "_has_experts"


class Marker(MoE):  # type: ignore[misc]  # which has no types
    """A module of DeepSpeed's class without parameters, which nobody calls."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.num_experts = 1

    def set_deepspeed_parallelism(self, *_: Any, **__: Any) -> None:
        """Do nothing: the groups are there."""


def group_name(ranks: int) -> str:
    """Return the name of the groups of so many ranks, whose number DeepSpeed reads from it."""
    return f"ep_size_{ranks}"


def mark_expert(parameter: Any, zero_stage: int, ranks: int, replicas: dist.ProcessGroup) -> None:
    """Let DeepSpeed reduce and shard a parameter over the `replicas` of its experts; before it is
    partitioned. `ranks`: how many hold all experts between them.
    """
    if zero_stage == 3:
        parameter.ds_zero_placement_family = "autoep_expert"
        parameter.ds_zero_partition_group_name = group_name(ranks)
        parameter.ds_zero_partition_process_group = replicas
    else:
        parameter.allreduce, parameter.group_name = False, group_name(ranks)


def is_expert(parameter: nn.Parameter) -> bool:
    """Return whether `mark_expert` has marked it."""
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
    """Tell DeepSpeed the groups of a model with marked parameters; before its engine is built.

    `parts`: the ranks that hold all parts of a layer's experts, more than `experts` where their
    width is divided, too: ZeRO 3 adds up the norm over these, BF16_Optimizer over tensor ranks and
    then over experts if a global says that there are several. Else either norm is too small.
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
    """Return optimizer groups of which each has experts alone or none, named as DeepSpeed asks."""
    split = []
    for number, group in enumerate(optimizer_groups):
        named = list(zip(group["names"], group["params"], strict=True))
        for experts in (False, True):
            some = [(n, p) for n, p in named if is_expert(p) == experts]
            if not some:
                continue
            names, parameters = zip(*some, strict=True)
            part = {**group, "names": list(names), "params": list(parameters)}
            if zero_stage < 3:
                part["name"] = parameters[0].group_name if experts else f"group_{number}"
                part["moe"] = experts
            split.append(part)
    return split
