"""Initial weights as a function of (seed, parameter name), and new rows for added tokens."""

import hashlib
import itertools
import math
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from harness.layout.families import DEVIATION_KEYS, is_residual
from harness.models.units import Unit, units

Weights = dict[str, torch.Tensor]
Send = Callable[[torch.Tensor, int], None]  # broadcast in place from a rank
Placed = Callable[[list[nn.Parameter]], None]
Read = Callable[[Unit], Weights]  # weights and saved buffers of a piece, by name
_MATRICES = (nn.Linear, nn.Embedding, Conv1D)
Cut = Callable[[str, torch.Tensor], nn.Parameter]  # the parameter that a rank keeps of a weight


def draw(model: PreTrainedModel, piece: Unit, seed: int, init: str = "config") -> Weights:
    """Draw one piece's weights: fp32 on the CPU, by qualified parameter name.

    Each module is initialised by the `_init_weights` of the innermost model around it, as in
    transformers, with a generator seeded from the module's name. Parents come after their children:
    GPT-2 redraws `c_proj` from a module that has no parameters itself. `init`: see model.init.
    Raises ValueError with the parameters that the model's own code leaves uninitialised.
    """
    slots = piece.parameters()
    for _, owner, attribute, parameter in slots:
        stand_in = torch.full(parameter.shape, torch.nan, dtype=torch.float32)
        owner._parameters[attribute] = nn.Parameter(stand_in, requires_grad=False)
    try:
        for name, module in piece.modules():
            with torch.random.fork_rng(devices=[]):
                # Weights are drawn on the CPU; torch.manual_seed would seed every GPU as well.
                torch.default_generator.manual_seed(_seed_of(seed, name))
                _innermost(model, name)._init_weights(module)
        drawn = {
            name: owner.get_parameter(attribute).detach() for name, owner, attribute, _ in slots
        }
    finally:
        for _, owner, attribute, parameter in slots:
            owner._parameters[attribute] = parameter
    missed = [name for name, tensor in drawn.items() if bool(tensor.isnan().any())]
    if missed:
        raise ValueError(
            f"{type(model).__name__}._init_weights leaves {', '.join(missed)} uninitialised; "
            "train it from pretrained weights instead (model.init_from)"
        )
    if init != "config":
        _redraw(model, piece, drawn, seed, init)
    return drawn


def _redraw(model: PreTrainedModel, piece: Unit, drawn: Weights, seed: int, init: str) -> None:
    """Draw linear layers and embeddings again, with the deviations of `init`."""
    config = model.config
    layers, width = config.num_hidden_layers, config.hidden_size
    usual, residual = math.sqrt(2 / (5 * width)), 2 / (layers * math.sqrt(width))
    if init == "depth_scaled":
        usual = next(getattr(config, key) for key in DEVIATION_KEYS if hasattr(config, key))
        residual = usual / math.sqrt(2 * layers)
    for name, owner, attribute, _ in piece.parameters():
        is_fused = attribute in ("gate_up_proj", "down_proj")  # of all experts
        is_matrix = isinstance(owner, _MATRICES) and attribute == "weight"
        if not (is_fused or is_matrix) or "dt_proj" in name:  # step sizes have their own range
            continue
        generator = torch.Generator().manual_seed(_seed_of(seed, f"{init}:{name}"))
        std = residual if is_residual(name) else usual
        drawn[name].normal_(0.0, std, generator=generator)
        if (row := getattr(owner, "padding_idx", None)) is not None:
            drawn[name][row] = 0.0


def _innermost(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """Return the innermost model that contains, or is, the named module."""
    for place in itertools.accumulate(name.split("."), "{}.{}".format) if name else ():
        module = model.get_submodule(place)
        if isinstance(module, PreTrainedModel):
            return _innermost(module, name.removeprefix(place).removeprefix("."))
    return model


@torch.no_grad()
def materialize(
    model: PreTrainedModel,
    seed: int | None,
    device: torch.device,
    *,
    init: str = "config",
    rank: int = 0,
    world_size: int = 1,
    send: Send | None = None,
    placed: Placed | None = None,
    cut: Cut | None = None,
    read: Read | None = None,
) -> None:
    """Give a skeleton its initial weights on `device`, in the skeleton's dtype.

    Ranks draw different pieces at the same time and `send` them to each other, so each tensor is
    drawn once. `placed` is called after each piece with its new parameters; ZeRO 3 partitions them
    there, so no rank ever holds more than two full pieces, the one it drew and the one it receives.
    `cut` makes the parameter that a rank keeps of each weight. `read` supplies weights and saved
    buffers instead of drawing them. Tied parameters stay one object. Without a seed nothing is
    drawn or sent, and the weights are zeros. If drawing or reading raises ValueError, that rank
    sends zeros, so that the others do not hang, and raises at the end.
    """
    send = send if seed is not None else None
    canonical: dict[int, str] = {}
    ties: list[tuple[str, str]] = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = canonical.setdefault(id(parameter), name)
        if first != name:
            ties.append((name, first))
    tied_names = {name for name, _ in ties}
    todo = [p for p in units(model) if {slot[0] for slot in p.parameters()} - tied_names]
    problem: ValueError | None = None
    weights: Weights
    for start in range(0, len(todo), world_size):
        round_ = todo[start : start + world_size]
        mine = weights = {}  # frees the previous piece before the next is drawn
        if rank < len(round_) and seed is not None:
            try:
                mine = read(round_[rank]) if read else draw(model, round_[rank], seed, init)
            except ValueError as error:
                problem = problem or error
                mine = {name: torch.zeros(p.shape) for name, _, _, p in round_[rank].parameters()}
        for owner, piece in enumerate(round_):
            weights = mine if owner == rank else {}
            _place(piece, weights, tied_names, device, owner, send, placed, cut)
            if read is not None:
                _place_buffers(piece, weights, device, owner, send)
    move_buffers(model, device)
    for name, first in ties:
        owner_name, _, attribute = name.rpartition(".")
        model.get_submodule(owner_name)._parameters[attribute] = model.get_parameter(first)
    if problem is not None:
        raise problem


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move a model's buffers to a device; those already there are left alone."""
    for module in model.modules():
        for attribute, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[attribute] = buffer.to(device)


def _place(
    piece: Unit,
    weights: Weights,
    skip: set[str],
    device: torch.device,
    owner_rank: int,
    send: Send | None,
    placed: Placed | None,
    cut: Cut | None,
) -> None:
    """Put one piece's weights, drawn here or received, on the device as parameters."""
    parameters = []
    for name, owner, attribute, parameter in piece.parameters():
        if name in skip:
            continue
        if name in weights:
            tensor = weights[name].to(device=device, dtype=parameter.dtype)
        else:
            tensor = torch.zeros(parameter.shape, device=device, dtype=parameter.dtype)
        if send is not None:
            send(tensor, owner_rank)
        filled = nn.Parameter(tensor) if cut is None else cut(name, tensor)
        filled.requires_grad_(parameter.requires_grad)
        owner._parameters[attribute] = filled
        parameters.append(filled)
    if placed is not None:
        placed(parameters)


def _place_buffers(
    piece: Unit, weights: Weights, device: torch.device, owner_rank: int, send: Send | None
) -> None:
    """Put one piece's saved buffers, read here or received, on the device."""
    for name, owner, attribute, buffer in piece.saved_buffers():
        if name in weights:
            buffer.copy_(weights[name])
        owner._buffers[attribute] = moved = buffer.to(device)
        if send is not None:
            send(moved, owner_rank)


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def with_rows(tensor: torch.Tensor, rows: int | None) -> torch.Tensor:
    """Return a weight (fewer rows, ...) extended to `rows` rows, or unchanged if it has enough.

    New rows are the mean of the others, computed in fp32: a new token starts as an average token.
    """
    if rows is None or tensor.ndim == 0 or len(tensor) >= rows:
        return tensor
    mean = tensor.float().mean(0, keepdim=True).to(tensor.dtype)
    return torch.cat([tensor, mean.expand(rows - len(tensor), *tensor.shape[1:])])


def vocabulary_of(model: PreTrainedModel) -> Weights:
    """Return the weights of a model's embedding and head by name; only one if they are tied."""
    modules = model.get_input_embeddings(), model.get_output_embeddings()
    own = {id(p) for module in modules if module is not None for p in module.parameters()}
    return {name: p.detach() for name, p in model.named_parameters() if id(p) in own}


def rows_of_adapters(weights: Path, model: PreTrainedModel) -> int | None:
    """Return the number of rows of the embedding in a peft weights file; None if it has none."""
    ending = next(iter(vocabulary_of(model)))
    with safe_open(weights, framework="pt") as file:
        shapes = [file.get_slice(n).get_shape() for n in file.keys() if n.endswith(ending)]  # noqa: SIM118
    return int(shapes[0][0]) if shapes else None


@torch.no_grad()
def add_rows(model: PreTrainedModel, rows: int | None) -> None:
    """Extend a whole model's embedding and head to `rows` rows if they have fewer; in place."""
    before = {name: len(weight) for name, weight in vocabulary_of(model).items()}
    if rows is None or rows <= min(before.values()):
        return
    model.resize_token_embeddings(rows, mean_resizing=False)
    for name, weight in vocabulary_of(model).items():
        weight.copy_(with_rows(weight[: before[name]], rows))
