"""Reads the weights of model.init_from with transformers, all at once or layer by layer.

Weights that must be changed are also read layer by layer: quantized weights are dequantized, and a
vocabulary gets rows for new tokens.
"""

import copy
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from harness.config.ds_json import Event
from harness.engine.meta_model import attention_of
from harness.engine.processes import raise_together
from harness.errors import ConfigError
from harness.models.initialize import with_rows
from harness.models.units import Unit, decoder_layers, units
from harness.plan.plan import Plan
from harness.plan.weights import weight_file_problems


def check_files(plan: Plan, empty: PreTrainedModel) -> None:
    """Raise ConfigError on all ranks for a problem in the files of model.init_from.

    The plan checks them too, but these are opened next, and under ZeRO-3 reading is collective.
    """
    source = plan.config.model.init_from
    assert source is not None
    named = getattr(empty.config, "transformers_weights", None)
    raise_together("; ".join(weight_file_problems(source, named, opens=True)) or None)


def config_of_files(plan: Plan, empty: PreTrainedModel) -> PretrainedConfig | None:
    """Return the config of model.init_from's files; None if it equals that of `empty`."""
    quantization, rows = plan.stored.get("quantization_config"), plan.stored.get("vocab_size")
    if not (isinstance(rows, int) and rows < plan.model_config.get("vocab_size", rows)):
        rows = None
    if not quantization and rows is None:
        return None
    config = copy.deepcopy(empty.config)
    if quantization:
        config.quantization_config = {**quantization, "dequantize": True}
    if rows is not None:
        config.vocab_size = rows
        if (getattr(config, "pad_token_id", None) or 0) >= rows:
            config.pad_token_id = None  # beyond the vocabulary
    return config


def read_weights(
    model_class: Any,
    plan: Plan,
    empty: PreTrainedModel,
    trust_remote_code: bool,
    config: PretrainedConfig | None = None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a `model_class` with the weights of model.init_from, and transformers' loading report.
    `config`: from `config_of_files`, if the files differ from `empty`.

    Raises ConfigError if the weights cannot be read or have other shapes.
    """
    source = plan.config.model.init_from
    if plan.world.rank:  # every rank reads; one progress bar is enough
        logging.disable_progress_bar()
    try:
        model, report = model_class.from_pretrained(
            source,
            config=config or empty.config,
            dtype=empty.dtype,
            attn_implementation=attention_of(plan),
            trust_remote_code=trust_remote_code,
            use_safetensors=True,  # never a pickle
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below: transformers only logs their names
        )
    except torch.OutOfMemoryError:
        raise
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise ConfigError(
            f"model.init_from={source}, for model.name={plan.config.model.name}: {error}"
        ) from error
    for name, stored, needed in sorted(report["mismatched_keys"]):
        sizes = f"{tuple(stored)}, but {plan.config.model.name}'s is {tuple(needed)}"
        raise ConfigError(f"model.init_from={source}, whose {name} is {sizes}")
    empty.generation_config = model.generation_config  # pipeline stages export `empty`
    return model, report


def check_report(plan: Plan, missing: Iterable[str], unexpected: Iterable[str]) -> list[Event]:
    """Return an event for unused weights, if any. Raises ConfigError for missing weights."""
    source = plan.config.model.init_from
    missing_names, unused = sorted(missing), sorted(unexpected)
    if missing_names:
        names = ", ".join(missing_names[:5])
        raise ConfigError(f"model.init_from={source} has no weights for {names}")
    if not unused or any(event["kind"] == "unused_weights" for event in plan.events):
        return []
    message = f"{source} has weights that the model does not use: {', '.join(unused[:5])}"
    return [{"kind": "unused_weights", "message": message, "names": unused}]


def reduced_class(
    whole: type[PreTrainedModel], reduce: Callable[[PreTrainedModel], None]
) -> type[PreTrainedModel]:
    """Return a subclass without the parameters that `reduce` removes, which are never read."""

    class Reduced(whole):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            reduce(self)
            self.all_tied_weights_keys: dict[str, str] = {}

    Reduced.__name__ = whole.__name__
    Reduced.__module__ = whole.__module__  # where the balancing loss is looked up
    return Reduced


def used_elsewhere(empty: PreTrainedModel) -> set[str]:
    """Return the names under which files may contain weights that a reduced model lacks."""
    names = {name for name, _ in empty.named_parameters(remove_duplicate=False)}
    names |= {name for name, _ in empty.named_buffers()}
    # Weights of the model without its head lack the prefix.
    return names | {name.removeprefix(f"{empty.base_model_prefix}.") for name in names}


class PieceReader:
    """Reads one piece of a model from the files of model.init_from. Missing rows of the vocabulary
    are the mean of the others. `copies`: weights that the files do not contain; they become zeros.
    """

    def __init__(
        self,
        plan: Plan,
        empty: PreTrainedModel,
        trust_remote_code: bool,
        copies: Collection[str] = (),
    ) -> None:
        self._plan, self._empty, self._copies = plan, empty, copies
        self._trust_remote_code = trust_remote_code
        self._config = config_of_files(plan, empty)
        self._elsewhere = used_elsewhere(empty)
        self._unexpected: set[str] = set()

    def __call__(self, piece: Unit) -> dict[str, torch.Tensor]:
        """Return tensors by qualified name, on the CPU.

        Raises ConfigError if the files lack a weight or have it in another shape.
        """
        if {name for name, *_ in piece.parameters()} <= {*self._copies}:
            return {name: torch.zeros(p.shape) for name, _, _, p in piece.parameters()}
        reduced = reduced_class(type(self._empty), lambda model: _leave_only(model, piece.name))
        how = self._plan, self._empty, self._trust_remote_code, self._config
        model, report = read_weights(reduced, *how)
        check_report(self._plan, {*report["missing_keys"]} - {*self._copies}, ())
        self._unexpected |= {*report["unexpected_keys"]} - self._elsewhere
        read = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        rows = {name: len(p) for name, _, _, p in piece.parameters() if p.ndim}
        return {name: with_rows(t, rows.get(name)) for name, t in read.items()}

    def events(self) -> list[Event]:
        """Return an event for weights that no piece uses, if any."""
        return check_report(self._plan, (), self._unexpected)


def _leave_only(model: PreTrainedModel, name: str) -> None:
    """Remove everything from a model but the piece of this name."""
    _, layers = decoder_layers(model)
    for piece in list(units(model)):
        if piece.name == name:
            continue
        if piece.whole:
            layers[int(piece.name.rpartition(".")[2])] = nn.Identity()
        else:
            model.set_submodule(piece.name, nn.Identity())
