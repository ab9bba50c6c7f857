"""Whether a model, its attention and its weights fit what a run asks of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.config.run_config import RunConfig
from harness.errors import ConfigError
from harness.layout.families import family_of
from harness.layout.shape import Shape
from harness.layout.sizes import UnknownArchitecture
from harness.layout.world import World
from harness.plan.model_config import find_model_config, load_model_config, max_positions
from harness.plan.optimizer import rule_problems
from harness.plan.weights import weight_file_problems

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_FLASH_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_3"}


@dataclass
class FoundModel:
    """What `model.name` came to, as far as it got."""

    run: RunConfig
    """With the attention that the model needs."""
    config: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    shape: Shape | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def find_model(run: RunConfig) -> FoundModel:
    """The model's config and shape, and what of the run does not fit them."""
    found = FoundModel(run)
    try:
        found.config, found.source = load_model_config(run)
        if run.model.init_from is not None:
            named = found.config.get("transformers_weights")
            found.problems += weight_file_problems(run.model.init_from, named)
        found.problems += position_problems(run, found.config)
        found.run, events, wrong = with_attention(run, found.config["model_type"])
        found.events += events
        found.problems += wrong
        found.shape = Shape.from_hf(found.config)
        found.problems += rule_problems(run, found.shape)
        found.problems += weights_problems(run, found.shape)
    except UnknownArchitecture as error:
        found.events.append({"kind": "unknown_architecture", "message": str(error)})
    except ConfigError as error:
        found.problems += error.problems
    except ValueError as error:
        found.problems.append(f"model.name is {run.model.name!r} ({found.source}): {error}")
    return found


def expert_problems(config: Mapping[str, Any], precision: str, name: str) -> Iterator[str]:
    """Widths of experts that torch multiplies in no group (grouped_mm): rows of 16 bytes each."""
    if not any(isinstance(config.get(key), int) for key in _EXPERT_COUNTS):
        return
    multiple = 4 if precision == "fp32" else 8
    inner = "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"
    for key in ("hidden_size", inner):
        width = config.get(key)
        if isinstance(width, int) and width % multiple:
            yield (
                f"{name} has {key} {width}, but torch multiplies {precision} experts only where it "
                f"is a multiple of {multiple}: set model.overrides.{key}"
            )


def attention_problems(run: RunConfig, world: World) -> Iterator[str]:
    """Whether this machine has the attention implementation."""
    package = _FLASH_PACKAGES.get(run.model.attention)
    if package and (world.accelerator == "cpu" or not importlib.util.find_spec(package)):
        yield (
            f"model.attention is {run.model.attention!r} ({run.origin('model.attention')}): it "
            f'needs a GPU and the package {package}: use "sdpa"'
        )


def with_attention(
    run: RunConfig, model_type: str
) -> tuple[RunConfig, list[dict[str, Any]], list[str]]:
    """Return the run, its event and its problems: attention is eager where sdpa is only a default
    and cannot compute the family's.
    """
    lacking = family_of(model_type).sdpa_lacks
    if run.model.attention != "sdpa" or not lacking:
        return run, [], []
    why = f"sdpa has no {lacking}, which {model_type} models have"
    if run.is_set("model.attention"):
        given = f"model.attention is 'sdpa' ({run.origin('model.attention')})"
        return run, [], [f"{given}: {why}: use eager, or flash_attention_2"]
    model = run.model.model_copy(update={"attention": "eager"})
    origins = {**run.origins(), "model.attention": f"what {model_type} needs"}
    run = run.model_copy(update={"model": model}).with_origins(origins)
    return run, [{"kind": "fallback", "message": f"model.attention=eager: {why}"}], []


def weights_problems(run: RunConfig, shape: Shape) -> Iterator[str]:
    """Whether the weights that are to be loaded are those of this model."""
    source = run.model.init_from
    if source is None:
        return
    given_config, _ = find_model_config(source, run.origin("model.init_from"), "model.init_from")
    theirs = Shape.from_hf(given_config)
    ours, given = ({t.name: t.shape for t in s.tensors()} for s in (shape, theirs))
    wrong = [name for name in ours if ours[name] != given.get(name)]
    wrong += [name for name in given if name not in ours]
    if wrong:
        yield (
            f"model.init_from is {source!r} ({run.origin('model.init_from')}), whose {wrong[0]} is "
            f"{given.get(wrong[0], 'not there')}, but {run.model.name}'s is "
            f"{ours.get(wrong[0], 'not there')}: set model.name={source}, without model.overrides "
            "of sizes"
        )


def position_problems(run: RunConfig, config: Mapping[str, Any]) -> Iterator[str]:
    """Whether samples fit the model's positions."""
    limit = max_positions(config)
    if limit is not None and run.data.seq_len > limit:
        yield (
            f"data.seq_len is {run.data.seq_len} ({run.origin('data.seq_len')}), but "
            f"{run.model.name} has {limit} positions: set data.seq_len to {limit} or less"
        )
