"""Builds this rank's pipeline stage of the plan's model.

Also computes the undivided model's loss and gradient norm, to compare the first step with.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from harness.data.batch import Batch
from harness.engine.api import Engine
from harness.engine.deepspeed_0_19.pipe_module import Tied
from harness.engine.forward import pairs_of
from harness.engine.meta_model import empty_model
from harness.engine.processes import raising_together
from harness.engine.reading import (
    PieceReader,
    check_files,
    check_report,
    config_of_files,
    read_weights,
    reduced_class,
    used_elsewhere,
)
from harness.engine.single_stage import materialize_share
from harness.errors import ConfigError
from harness.layout.recompute import REVERSIBLE
from harness.layout.stages import layers_per_stage
from harness.models.flow import Flow, trace_flow
from harness.models.initialize import Cut, materialize
from harness.models.loss import LossSetup, forward
from harness.models.recompute import checkpoint_layers
from harness.models.reversible import reverse_layers
from harness.models.stage import Stage, reduce_to_stage
from harness.plan.overrides import DROPOUT_ENDINGS
from harness.plan.plan import Plan


def build_stage(
    plan: Plan,
    empty: PreTrainedModel,
    device: torch.device,
    trust_remote_code: bool,
    blank: bool,
    cut: Cut | None,
) -> tuple[Stage, Tied, list[dict[str, Any]]]:
    """Return this rank's stage on `device`, its tied weights, and events. Collective.

    Weights of other stages are never initialised or read. Raises ConfigError for a model that
    cannot be split into stages, naming what it lacks, and as `build_single_stage` does.
    """
    where = f"pipeline.stages={plan.grid.pipeline}, model.name={plan.config.model.name}"
    try:
        flow = trace_flow(empty)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}; use ZeRO 3 instead of stages") from error
    reads = plan.config.model.init_from is not None and not blank
    if reads:
        check_files(plan, empty)
    assert plan.stages is not None
    counts, place = layers_per_stage(plan.stages), plan.grid.coords(plan.world.rank).pipeline
    first_layer, end_layer = sum(counts[:place]), sum(counts[: place + 1])
    reduce = partial(reduce_to_stage, flow=flow, first_layer=first_layer, end_layer=end_layer)
    copies = {name for _, name in flow.tied}  # in no file; broadcast by the first stage
    with raising_together(where):  # a problem may concern one stage only
        if reads and cut is None and config_of_files(plan, empty) is None:
            reduced = reduced_class(type(empty), reduce)
            model, report = read_weights(reduced, plan, empty, trust_remote_code)
            events = check_report(
                plan,
                set(report["missing_keys"]) - copies,
                set(report["unexpected_keys"]) - used_elsewhere(empty),
            )
            model = nn.Module.to(model, device)
        else:
            reduce(model := empty_model(plan, trust_remote_code))
            reader = PieceReader(plan, empty, trust_remote_code, copies) if reads else None
            materialize_share(model, plan, device, blank, cut, reader)
            events = reader.events() if reader else []
        stage = Stage(model)
    return stage, _tied(plan, model, flow), events


def _tied(plan: Plan, model: PreTrainedModel, flow: Flow) -> Tied:
    """Return this stage's weights that the pipeline's other end holds, too. Collective."""
    tied: Tied = []
    for names in flow.tied:
        for column in plan.grid.groups("pipeline"):
            ends = (column[0], column[-1])
            group = dist.new_group(ends)
            if plan.world.rank in ends:
                name = names[ends.index(plan.world.rank)]
                weight: Any = model.get_parameter(name)
                weight.tied_to = names[0]  # its name in checkpoints
                tied.append((weight, group))
    return tied


def unsplit_loss_and_norm(
    engine: Engine, empty: PreTrainedModel, batches: Sequence[Batch], targets: int
) -> tuple[float, float | None]:
    """Return the loss in nats and the gradient norm of a global batch before the first step of
    `engine`, by its undivided model `empty` and without randomness. The norm is None for a model
    whose training steps are random.

    Layers are recomputed and gradients summed in fp32: this takes about `bytes_needed` bytes.
    """
    plan, device = engine.plan, engine.device
    objective = engine.setup.preferences
    if objective is not None:  # of whole rows, and not counted
        objective = replace(objective, group=None, tallies=torch.zeros_like(objective.tallies))
    padded, own = engine.setup.gets_padding, engine.setup.own
    setup = LossSetup(gets_padding=padded, preferences=objective, own=own)
    smoothing = plan.config.train.label_smoothing
    differs = bool(smoothing) or setup.own is not None  # the loss, from that of an evaluation
    reads = plan.config.model.init_from is not None
    if not reads or config_of_files(plan, empty) is not None:
        model = copy.deepcopy(empty)
        reader = PieceReader(plan, empty, trust_remote_code=False) if reads else None
        config = plan.config
        materialize(model, config.train.seed, device, init=config.model.init, read=reader)
    else:
        model = read_weights(type(empty), plan, empty, trust_remote_code=False)[0]
        model = nn.Module.to(model, device)
    compares_norm = not (is_random(model) or plan.config.model.stochastic_depth)
    model.train(compares_norm)
    if plan.checkpointing == REVERSIBLE:
        reverse_layers(model)
    else:
        checkpoint_layers(model, "full")
    parameters = trained(model) if compares_norm else []
    sums = {parameter: torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters}
    loss = torch.zeros((), device=device)
    for batch in batches:
        keywords = batch.keywords(plan.config.model.attention, device)
        pairs = pairs_of(batch, device)
        if differs or not compares_norm:
            how, tokens = setup.in_evaluation, batch.on(device)
            with torch.no_grad():
                token_loss, _ = forward(model, *tokens, how, keywords=keywords, pairs=pairs)
            loss += token_loss / max(targets, 1)
        if not compares_norm:
            continue
        tokens = batch.on(device)
        token_loss, auxiliary = forward(model, *tokens, setup, smoothing, keywords, pairs)
        share = token_loss / max(targets, 1)
        if not differs:
            loss += share.detach()
        if auxiliary is not None:
            share = share + auxiliary / len(batches)
        (share * engine.loss_scale).backward()
        for parameter, total in sums.items():
            if parameter.grad is not None:
                total += parameter.grad.float() / engine.loss_scale
            parameter.grad = None
    if not compares_norm:
        return float(loss), None
    # In fp64, as in DeepSpeed: on CPUs torch's norm of a large fp32 tensor is off by 2e-5.
    norms = [torch.linalg.vector_norm(total, dtype=torch.float64) for total in sums.values()]
    return float(loss), float(torch.linalg.vector_norm(torch.stack(norms)))


def is_random(model: nn.Module) -> bool:
    """Return True if a training step draws random numbers: dropout, or noise in a router."""
    endings = (*DROPOUT_ENDINGS, "jitter_noise")
    return any(
        (isinstance(module, nn.Dropout) and module.p > 0)
        or any(
            isinstance(v, float) and v > 0 and k.endswith(endings) for k, v in vars(module).items()
        )
        for module in model.modules()
    )


def bytes_needed(plan: Plan, empty: PreTrainedModel) -> int:
    """Return the bytes of weights, gradients and their fp32 sums; each layer's input and the peak
    of one layer (about 32 hidden states); and the logits as the loss needs them (docs/memory.md).
    """
    states = sum(p.numel() * (2 * p.element_size() + 4) for p in trained(empty))
    embedding = empty.get_input_embeddings().get_parameter("weight")
    vocab_size, hidden_size = embedding.shape
    layers = int(empty.config.get_text_config(decoder=True).num_hidden_layers)
    per_token = (layers + 32) * hidden_size * empty.dtype.itemsize + 16 * vocab_size
    return states + plan.micro_batch * plan.seq_len * per_token


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that get a gradient."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
