"""One pipeline stage of the model that a plan names, with the weights of the unsplit one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from harness.engine.deepspeed_0_19.pipe_module import Tied
from harness.engine.empty import empty_model
from harness.engine.groups import sender
from harness.engine.processes import raise_together
from harness.engine.reading import (
    PieceReader,
    check_files,
    check_report,
    config_of_files,
    read_weights,
    reduced_class,
    used_elsewhere,
)
from harness.errors import ConfigError
from harness.layout.stages import layers_per_stage
from harness.models.flow import Flow, trace_flow
from harness.models.initialize import Cut, materialize
from harness.models.stage import Stage, reduce_to_stage
from harness.plan.plan import Plan


def build_stage(
    plan: Plan,
    empty: PreTrainedModel,
    device: torch.device,
    trust_remote_code: bool,
    blank: bool,
    cut: Cut | None,
) -> tuple[Stage, Tied, list[dict[str, Any]]]:
    """This rank's stage on `device`, what it has in common with another, and events; its weights
    are zeros where it is to be `blank`. `cut`: makes its parts of weights.

    Nothing of the other stages is ever drawn or read. Raises ConfigError for a model that cannot be
    cut into stages, naming what it lacks, and as `build_whole` does.
    """
    where = f"pipeline.stages={plan.grid.pipeline}, model.name={plan.config.model.name}"
    try:
        flow = trace_flow(empty)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}; ZeRO 3 needs no stages") from error
    if plan.config.model.init_from is not None and not blank:
        check_files(plan, empty)
    built, problem = None, None
    try:
        built = _built(plan, empty, flow, device, trust_remote_code, blank, cut)
    except ConfigError as error:
        problem = str(error)
    except ValueError as error:
        problem = f"{where}: {error}"
    raise_together(problem)  # a stage may lack what another has
    assert built is not None
    stage, events = built
    return stage, _tied(plan, stage.model, flow), events


def _built(
    plan: Plan,
    empty: PreTrainedModel,
    flow: Flow,
    device: torch.device,
    trust_remote_code: bool,
    blank: bool,
    cut: Cut | None,
) -> tuple[Stage, list[dict[str, Any]]]:
    assert plan.stages is not None
    counts, place = layers_per_stage(plan.stages), plan.grid.coords(plan.world.rank)
    first_layer = sum(counts[: place.pipeline])
    end_layer = first_layer + counts[place.pipeline]
    reads, copies = plan.config.model.init_from is not None and not blank, _copies(flow)
    if reads and cut is None and config_of_files(plan, empty) is None:
        reduced = reduced_class(
            type(empty), lambda model: reduce_to_stage(model, flow, first_layer, end_layer)
        )
        model, report = read_weights(reduced, plan, empty, trust_remote_code)
        events = check_report(
            plan,
            set(report["missing_keys"]) - copies,
            set(report["unexpected_keys"]) - used_elsewhere(empty),
        )
        return Stage(nn.Module.to(model, device)), events
    share = plan.share
    model, replicas = empty_model(plan, trust_remote_code), share.ranks("replicas")
    reduce_to_stage(model, flow, first_layer, end_layer)
    reader = PieceReader(plan, empty, trust_remote_code, copies) if reads else None
    materialize(
        model,
        None if blank else plan.config.train.seed,
        device,
        rank=replicas.index(share.rank),
        world_size=len(replicas),
        send=sender(share),
        cut=cut,
        read=reader,
    )
    return Stage(model), reader.events() if reader else []


def _copies(flow: Flow) -> set[str]:
    """Return the names of tied weights' copies, which are in no file; they are sent."""
    return {name for _, name in flow.tied}


def _tied(plan: Plan, model: PreTrainedModel, flow: Flow) -> Tied:
    """Weights of this stage that the pipeline's other end holds too, with the group of both."""
    tied: Tied = []
    for names in flow.tied:
        for column in plan.grid.groups("pipeline"):
            ends = (column[0], column[-1])
            group = dist.new_group(ends)
            if plan.world.rank in ends:
                name = names[ends.index(plan.world.rank)]
                weight: Any = model.get_parameter(name)
                weight.tied_to = names[0]  # under which checkpoints have it
                tied.append((weight, group))
    return tied
