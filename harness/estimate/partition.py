"""ZeRO's shards of parameters: groups, padding, and whole parameters."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from harness.layout.adapters import Adapters, Quantization, linear_weights
from harness.layout.expert import EXPERTS
from harness.layout.optimizer_table import GroupRule, Parameter, is_frozen, optimizer_groups
from harness.layout.shape import Shape, Tensor


@lru_cache(maxsize=256)
def quantized_elements(shape: Shape, quantization: Quantization | None) -> list[int]:
    """Return the number of elements in each quantized weight."""
    return [] if quantization is None else [tensor.numel for tensor in linear_weights(shape)]


@lru_cache(maxsize=256)
def trained_tensors(
    shape: Shape, rules: tuple[GroupRule, ...], adapters: Adapters | None
) -> list[Tensor]:
    """Return the parameters that the optimizer updates."""
    if adapters is not None:
        return [*adapters.tensors(shape)]
    tensors = [*shape.tensors()]
    return [t for t in tensors if not is_frozen(t.name, rules)] if rules else tensors


@lru_cache(maxsize=256)
def parameter_groups(
    shape: Shape, rules: tuple[GroupRule, ...], adapters: Adapters | None, muon: bool, divided: bool
) -> list[list[Tensor]]:
    """Return the optimizer's parameter groups, each in model order.

    Weight decay applies to matrices but not to biases, norms and embeddings, tied or not. `divided`
    experts have separate groups.
    """
    tensors = {tensor.name: tensor for tensor in trained_tensors(shape, rules, adapters)}
    parameters = (
        Parameter(
            name,
            matrix=len(tensor.shape) >= 2 and tensor.kind != "embedding",
            head=tensor.kind == "head",
        )
        for name, tensor in tensors.items()
    )
    groups = optimizer_groups(parameters, 1.0, rules, muon)
    named = [[tensors[name] for name in names] for _, names in groups]
    if not divided:
        return named
    parts = [
        [tensor for tensor in group if (tensor.kind == EXPERTS) == experts]
        for group in named
        for experts in (False, True)
    ]
    return [part for part in parts if part]


def is_of_experts(group: Sequence[Tensor]) -> bool:
    """Return True if a group contains sharded experts."""
    return group[0].kind == EXPERTS


# Every shard of a flat buffer is aligned to 4 bytes (stage_1_and_2.py,
# nccl_start_alignment_factor).
_ALIGNMENT = 2


@dataclass(frozen=True)
class Flat:
    """One optimizer group as ZeRO 1 and 2 lay it out: concatenated, padded, split evenly."""

    numels: tuple[int, ...]
    shards: int
    apart: int = 1
    """Stride of the ranks that hold the shards: 2 if the ranks between hold other experts."""

    def index(self, rank: int) -> int:
        """Return the shard index of ZeRO's rank `rank`."""
        return rank // self.apart

    @property
    def padded(self) -> int:
        """Elements of the flat buffer, with padding."""
        return self.shard * self.shards

    @cached_property
    def shard(self) -> int:
        """Elements of one rank's shard."""
        return -(-sum(self.numels) // (_ALIGNMENT * self.shards)) * _ALIGNMENT

    @cached_property
    def whole(self) -> tuple[int, ...]:
        """Per rank, the full size in elements of all parameters that overlap its shard.

        ZeRO 1 and 2 copy reduced gradients out of the bucket by whole parameters (stage_1_and_2.py,
        copy_grads_in_partition).
        """
        totals = [0] * self.shards
        end = 0
        for numel in self.numels:
            begin, end = end, end + numel
            for rank in range(begin // self.shard, (end - 1) // self.shard + 1):
                totals[rank] += numel
        return tuple(totals)

    def elsewhere(self, rank: int, above: int) -> int:
        """Return the elements of parameters larger than `above` outside a rank's shard."""
        first, last = rank * self.shard, (rank + 1) * self.shard
        ends = zip(self.numels, accumulate(self.numels), strict=True)
        return sum(
            numel for numel, end in ends if numel > above and (end <= first or end - numel >= last)
        )

    def end_padding(self, rank: int) -> int:
        """Return the elements of a rank's shard that belong to no parameter."""
        return min(self.shard, max(0, (rank + 1) * self.shard - sum(self.numels)))


def piece(numel: int, shards: int) -> int:
    """Return the elements, with padding, of a rank's part of a parameter that ZeRO 3 shards."""
    return -(-numel // shards)


def sub_groups(groups: Sequence[Sequence[Tensor]], shards: int, limit: int) -> list[int]:
    """Return the elements of each sub-group that ZeRO 3 steps (stage3.py, _create_fp16_sub_groups).

    A sub-group ends with the parameter that reaches `limit`.
    """
    sizes = []
    for group in groups:
        pieces = [piece(tensor.numel, shards) for tensor in group]
        if limit >= sum(pieces):
            sizes.append(sum(pieces))
            continue
        filled = 0
        for index, numel in enumerate(pieces):
            filled += numel
            if filled >= limit or index == len(pieces) - 1:
                sizes.append(filled)
                filled = 0
    return sizes
