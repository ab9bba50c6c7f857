"""Names and layout of a model's tensors in a folder that `save_pretrained` writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

Tensors = dict[str, torch.Tensor]
# Read(name, offset, out): fill flat `out` with a tensor's elements from `offset` on.
Read = Callable[[str, int, torch.Tensor], None]


@dataclass(frozen=True)
class _Part:
    """Tensors of the model that become tensors of the folder together: `made`, on meta.

    `rows`: how many of a single source's are converted at a time (experts, one after the other).
    """

    sources: Tensors
    made: Tensors
    rows: int | None = None

    @property
    def is_renamed(self) -> bool:
        """True for a single tensor that is not converted."""
        source, made = next(iter(self.sources.values())), next(iter(self.made.values()))
        return len(self.sources) == len(self.made) == 1 and source is made


class HubLayout:
    """The tensors that `model.save_pretrained` would write, of a model whose weights are on meta.

    transformers 5 keeps some architectures in another layout than their files (all experts of a
    mixture in one tensor) and converts the whole model when it saves. Here the smallest sets of
    tensors are found that convert alone, so that one of them is in memory at a time.
    """

    def __init__(self, model: PreTrainedModel, piece_bytes: int) -> None:
        self._model, self._piece_bytes = model, piece_bytes
        first = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
        state = _to_be_saved(model)
        self.names_of_sources = {n: first[id(model.get_parameter_or_buffer(n))] for n in state}
        """Name in the model by name in the file: tied weights have several."""
        if getattr(model, "_weight_conversions", None) is None:  # else asked for at every part
            every = get_model_conversion_mapping(model, add_legacy=False)
            every = [c for c in every if not isinstance(c, PrefixChange)]  # as transformers does
            vars(model)["_weight_conversions"] = every or None
        self.tensors: Tensors = self._converted(state)
        """The tensors to be written, on meta, in the order of the shards."""
        self._parts = [self._by_rows(part) for part in self._find_parts(state)]

    def pieces(self, read: Read) -> Iterator[tuple[str, int, torch.Tensor]]:
        """(name, offset, elements from there on) of all tensors, as few at a time as convert alone;
        of those that need no conversion about `piece_bytes`.
        """
        for part in self._parts:
            if part.is_renamed:
                yield from self._renamed(part, read)
            elif part.rows is not None:
                yield from self._rows(part, part.rows, read)
            else:
                sources = {
                    name: torch.empty_like(t, device="cpu") for name, t in part.sources.items()
                }
                for name, tensor in sources.items():
                    read(self.names_of_sources[name], 0, tensor.view(-1))
                yield from ((name, 0, tensor) for name, tensor in self._converted(sources).items())

    def _renamed(self, part: _Part, read: Read) -> Iterator[tuple[str, int, torch.Tensor]]:
        ((name, whole),), (target,) = part.sources.items(), part.made
        most = max(1, self._piece_bytes // whole.itemsize)
        for offset in range(0, whole.numel(), most):
            piece = torch.empty(min(most, whole.numel() - offset), dtype=whole.dtype)
            read(self.names_of_sources[name], offset, piece)
            yield target, offset, piece

    def _rows(self, part: _Part, most: int, read: Read) -> Iterator[tuple[str, int, torch.Tensor]]:
        ((name, whole),) = part.sources.items()
        names, row = list(part.made), whole[0].numel()
        for start in range(0, len(whole), most):
            count = min(most, len(whole) - start)
            rows = torch.empty((count, *whole.shape[1:]), dtype=whole.dtype)
            read(self.names_of_sources[name], start * row, rows.view(-1))
            for number, value in enumerate(self._converted({name: rows}).values()):
                block, index = divmod(number, count)
                yield names[block * len(whole) + start + index], 0, value

    def _by_rows(self, part: _Part) -> _Part:
        """The same, a few rows at a time where it is large and its rows convert alone."""
        whole = next(iter(part.sources.values()))
        if len(part.sources) > 1 or whole.ndim < 3 or whole.nbytes <= self._piece_bytes:
            return part
        names, length = list(part.made), len(whole)
        blocks, rest = divmod(len(names), length)
        count = max(1, self._piece_bytes // whole[0].nbytes)
        few = self._converted({n: t[:count] for n, t in part.sources.items()})
        expected = [names[b * length + i] for b in range(blocks) for i in range(count)]
        if rest or list(few) != expected or not _agree(few, part.made):
            return part
        return _Part(part.sources, part.made, count)

    def _find_parts(self, state: Tensors) -> list[_Part]:
        remaining, parts = dict(state), []
        for same in (lambda n: n, lambda n: n.rpartition(".")[0], _layer, lambda n: ""):
            groups: dict[str, Tensors] = defaultdict(dict)
            for name, tensor in remaining.items():
                groups[same(name)][name] = tensor
            for group in groups.values():
                try:
                    made = self._converted(group)
                except (LookupError, RuntimeError, ValueError):  # its counterpart is not there
                    continue
                if _agree(made, self.tensors):
                    parts.append(_Part(group, made))
                    remaining = {name: t for name, t in remaining.items() if name not in group}
        made_names = [name for part in parts for name in part.made]
        if sorted(made_names) != sorted(self.tensors):
            return [_Part(state, self.tensors)]
        return parts

    def _converted(self, tensors: Tensors) -> Tensors:
        if self._model._weight_conversions is None:
            return tensors
        reverted: Tensors = revert_weight_conversion(self._model, dict(tensors))
        return reverted


def _to_be_saved(model: PreTrainedModel) -> Tensors:
    """Return the model's state on meta: tied weights once, nothing that can be computed."""
    state = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    return remove_tied_weights_from_state_dict(state, model)


def _agree(some: Tensors, every: Tensors) -> bool:
    return all(
        name in every and (t.shape, t.dtype) == (every[name].shape, every[name].dtype)
        for name, t in some.items()
    )


def _layer(name: str) -> str:
    """Return a name up to its first number: `model.layers.3.mlp.up` -> `model.layers.3`."""
    words = name.split(".")
    at = next((place for place, word in enumerate(words) if word.isdigit()), -1)
    return ".".join(words[: at + 1])
