"""Defects that the gates must catch, planted one at a time in the real engine.

`change(original, world)` returns the replacement of each target on a rank.
"""

import contextlib
import copy
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from harness.checkpoint.index import BUFFER, WEIGHT
from harness.layout.world import World
from harness.models.exchange import copied, joined
from tests.gates import recipe
from tests.gates import replacements as new
from tests.gates.cell import Cell, Trip
from tests.gates.models import FROZEN
from tests.gates.streams.cells import CONTROLS

Change = Callable[[Any, World], Any]

ZERO1 = "llama-zero1-fp32-4-2"
ZERO3 = "llama-zero3-fp32-1-2"
PIPELINED = "llama_tied-pipe2_zero1-fp32-4-2"
EXPERTS = "mixtral-zero2-fp32-4-2"
TENSOR = "llama-tensor2_zero1-fp32-4-2"
TENSOR_ZERO3 = "llama_tied-tensor2_zero3-fp32-4-2"
ROWS = "llama-sequence2_zero1-fp32-4-2"
DIVIDED_STAGES = "llama_tied-pipe2_tensor2_zero1-fp32-2-4"
DIVIDED_EXPERTS_ZERO3 = "mixtral-expert2_zero3-fp32-4-2"
VARLEN_WINDOW = "mistral-varlen_zero1-bf16-4-2"
PAIRS = "llama-dpo_zero1-fp32-2-2"
PAIRED_ROWS = "llama-dpo_sequence2_zero1-fp32-4-2"
CHUNKED = "gpt2-chunked_zero3-fp32-4-2"
CHUNKED_STAGE = "gemma2-chunked_pipe2_zero1-fp32-4-2"
EVERY = (ZERO1, ZERO3, PIPELINED)

ENGINES = ("harness.engine.zero.ZeroEngine", "harness.engine.pipeline.PipelineEngine")


@dataclass(frozen=True)
class Defect:
    """The replaced targets, and the cells in which the defect must show.

    `targets` are dotted names; `engine.NAME` is that method in each engine class that defines it.
    """

    targets: str
    change: Change
    shows_in: tuple[Any, ...]
    """Cells, or names of parity cells; empty for EVERY."""

    @property
    def cells(self) -> tuple[Any, ...]:
        places = self.shows_in or EVERY
        return tuple(Cell.named(place) if isinstance(place, str) else place for place in places)

    @contextlib.contextmanager
    def planted(self, world: World) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for target in self.targets.split():
                place, _, name = target.rpartition(".")
                for owner in map(pkgutil.resolve_name, ENGINES if place == "engine" else (place,)):
                    if place == "engine" and name not in vars(owner):
                        continue
                    original = getattr(owner, name)
                    changed = self.change(original, world)
                    if isinstance(original, dict):  # importers share this object
                        stack.enter_context(mock.patch.dict(original, changed))
                    else:
                        stack.enter_context(mock.patch.object(owner, name, changed))
            yield


def _at(targets: str, change: Change, *cells: str) -> Defect:
    return Defect(targets, change, cells)


# Targets of several defects, each with a function that turns a change into a defect.


def _batches(change: Callable[[list[Any], World], object], *cells: str) -> Defect:
    """Change a rank's micro-batches in every step before they are trained on."""

    def wrap(original: Any, world: World) -> Any:
        def accumulate(self: Any, batches: list[Any], count: int) -> Any:
            change(batches, world)
            return original(self, batches, count)

        return accumulate

    return Defect("engine.accumulate", wrap, cells)


def _losses(change: Callable[..., Any], *cells: str) -> Defect:
    """Change a micro-batch's summed loss and balancing loss, given its labels and the world."""

    def wrap(original: Any, world: World) -> Any:
        def losses(model: Any, inputs: Any, labels: torch.Tensor, *more: Any) -> Any:
            return change(*original(model, inputs, labels, *more), labels, world)

        return losses

    places = "harness.engine.forward.forward harness.engine.pipeline.losses"
    return Defect(places, wrap, cells)


def _before_step(change: Callable[[Any, World], object], *cells: str) -> Defect:
    """Change the DeepSpeed engine between setting the learning rates and the step."""

    def wrap(original: Any, world: World) -> Any:
        def step(self: Any) -> None:
            change(self.engine, world)
            original(self)

        return step

    return Defect("engine._step", wrap, cells)


def _initialize(change: Callable[[Any, Any], object], *cells: str) -> Defect:
    """Change the JSON and the parameter groups that reach DeepSpeed."""

    def wrap(original: Any, world: World) -> Any:
        def initialize(**kwargs: Any) -> Any:
            kwargs["config"] = copy.deepcopy(kwargs["config"])
            change(kwargs["config"], kwargs["model_parameters"])
            return original(**kwargs)

        return initialize

    return Defect("deepspeed.initialize", wrap, cells)


def _json(*cells: str, **values: Any) -> Defect:
    return _initialize(lambda config, _: config.update(values), *cells)


def _adam(*cells: str, **values: Any) -> Defect:
    return _initialize(lambda config, _: config["optimizer"]["params"].update(values), *cells)


def _groups(*cells: str, **values: Any) -> Defect:
    return _initialize(lambda _, groups: [group.update(values) for group in groups], *cells)


def _model_file(change: Callable[[dict[str, Any]], object], *cells: str) -> Defect:
    """Change the values of a model's config file on their way to transformers."""

    def wrap(original: Any, world: World) -> Any:
        def for_model(model_type: str, **values: Any) -> Any:
            change(values)
            return original(model_type, **values)

        return staticmethod(for_model)

    return Defect("harness.models.skeleton.AutoConfig.for_model", wrap, cells)


def _ignored(name: str, *cells: str) -> Defect:
    def drop(values: dict[str, Any]) -> None:
        assert values.pop(name, None) is not None

    return _model_file(drop, *cells)


def _gradients_times(factor: float) -> Defect:
    """Scale the gradients; the reported loss stays correct."""

    def scale(loss: Any, balancing: Any, *_: Any) -> Any:
        return tuple(x if x is None else new.Scaled.apply(x, factor) for x in (loss, balancing))

    return _losses(scale)


_TIED = "harness.engine.deepspeed_0_19.pipe_module.StageModule.get_tied_weights_and_groups"
_ADAMS = (
    "deepspeed.ops.adam.FusedAdam",
    "deepspeed.ops.adam.DeepSpeedCPUAdam",
    "torch.optim.AdamW",
)
# fmt: off
PARITY = {
    # Preference pairs.
    "the reference of the other side": _at(
        "harness.engine.forward.pairs_of",
        new.with_pairs(reference=lambda own: own.flip(1)), PAIRS),
    "pairs apart from their reference": _at(
        "harness.engine.forward.pairs_of", new.with_pairs(reference=lambda own: own.roll(1, 0)),
        PAIRS),
    "a side of the next pair": _at(
        "harness.engine.forward.pairs_of",
        new.with_pairs(segments=lambda own: torch.where(own % 2 == 1, own.roll(1, 0), own)), PAIRS),
    "means over the tokens of a side": _at(
        "harness.models.preferences.Preferences._of",
        lambda of, _: lambda self, sums, tokens, *rest: of(self, sums / tokens, tokens, *rest),
        PAIRS),
    "beta left out": _at(
        "harness.models.preferences.Preferences._of",
        lambda of, _: lambda self, *rest: of(replace(self, beta=1.0), *rest), PAIRS),
    "gradients of pairs summed over ranks that share rows": _at(
        "harness.models.preferences.added",
        lambda added, _: lambda sums, group: copied(added(sums, group), group), PAIRED_ROWS),
    "gradients x2": _gradients_times(2.0),
    "gradients x1.00001": _gradients_times(1.00001),
    "Adam's step off by one": _at(
        " ".join(f"{adam}.step" for adam in _ADAMS), new.with_empty_first_step),
    "one sample dropped": _batches(new.drop_sample),
    "no clipping": _json(gradient_clipping=0.0),
    "decay on norms": _groups(weight_decay=recipe.WEIGHT_DECAY),
    "a dropped attention mask": _at(
        "harness.models.attention._numbered", lambda *_: lambda *_, **__: None),
    "a stage's layers in the wrong order": _at(
        "harness.models.stage.Stage.forward", new.layers_swapped, PIPELINED),
    "a dropped sum of tied gradients": _at(
        _TIED, lambda *_: lambda module: [], PIPELINED, DIVIDED_STAGES),
    "tied gradients summed over the wrong ranks": _at(
        _TIED, lambda *_: lambda module: [(weight, dist.group.WORLD) for weight, _ in module._tied],
        DIVIDED_STAGES),
    # The learning rate and the optimizer.
    "the learning rate one step late": _at("engine.apply", new.rate_of_last_step),
    "the learning rate for the first group only": _before_step(new.rate_of_first_group),
    "the learning rate times the ranks": _before_step(new.rate_times_ranks, ZERO3),
    "eps not passed on": _adam(ZERO1, PIPELINED, eps=1e-8),
    "betas not passed on": _adam(ZERO3, betas=(0.9, 0.999)),
    "L2 for decoupled decay": _initialize(new.use_l2, ZERO1),
    "no decay": _groups(ZERO1, weight_decay=0.0),
    "a rule for parameters ignored": _groups(ZERO1, PIPELINED, lr_multiplier=1.0),
    "moments forgotten": _before_step(new.forget_moments, ZERO1),
    "masters in bf16": _before_step(new.round_masters, ZERO1),
    "clipping at twice the norm": _json(ZERO3, gradient_clipping=2 * recipe.CLIP_NORM),
    "the norm after clipping": _at("engine.apply", new.clipped_norm, ZERO1),
    # Sums.
    "sums in bf16": _initialize(
        lambda config, _: config["data_types"].update(grad_accum_dtype="bf16"),
        "llama-zero1-bf16-4-2", "llama-zero3-bf16-4-2"),
    "a mean of micro-batches' means": _losses(new.mean_of_means, ZERO1, PIPELINED),
    "a micro-batch dropped": _batches(
        lambda batches, _: batches[-1].labels.fill_(-100), ZERO1, PIPELINED),
    "balancing losses added up": _losses(lambda loss, balancing, *_: (loss, 4 * balancing),
    EXPERTS),
    # Samples.
    "all ranks read the same": _at(
        "harness.data.batches.share_of_rank",
        lambda share, _: lambda first, batch, micro, _, ranks: share(first, batch, micro, 0, ranks),
        ZERO1),
    "a loss on prompts": _batches(new.train_prompts, ZERO1),
    "labels not shifted": _batches(new.unshift, ZERO3),
    "positions across documents": _batches(new.number_on, ZERO3),
    # The model.
    "another seed": _at(
        "harness.models.initialize.draw",
        lambda draw, _: lambda model, piece, seed, init: draw(model, piece, seed + 1, init),
        ZERO3, PIPELINED),
    "rope_parameters ignored": _ignored("rope_parameters", ZERO1),
    "rms_norm_eps ignored": _ignored("rms_norm_eps", ZERO3),
    "hidden_act ignored": _ignored("hidden_act", PIPELINED),
    "sliding_window ignored": _ignored("sliding_window", "mistral-pipe2_zero0-fp32-2-2"),
    "query_pre_attn_scalar ignored": _ignored("query_pre_attn_scalar", "gemma2-zero2-fp32-4-2"),
    "router_aux_loss_coef ignored": _ignored("router_aux_loss_coef", EXPERTS),
    "dropout on": _model_file(lambda values: values.update(attention_dropout=0.1)),
    # Documents separated by bounds.
    "bounds of documents off by one": _at(
        "harness.models.varlen._in_turn", new.bounds_late,
        "llama-varlen_zero0-fp32-1-2", VARLEN_WINDOW),
    "windows within documents ignored": _at(
        "harness.models.varlen._in_turn",
        lambda in_turn, _: lambda *states, before, **how: in_turn(*states, before=-1, **how),
        VARLEN_WINDOW),
    # Sequence parallelism.
    "documents lost across ranks": _at(
        "harness.models.sequence.create_masks_for_generate",
        lambda make, _: lambda *args, position_ids: make(*args, position_ids=None), ROWS),
    "the positions of the first part of a row": _at(
        "harness.models.sequence.DividedRows.keywords", new.positions_of_rank_0, ROWS),
    "the mean of a rank without targets": _losses(new.mean_of_own_targets, ROWS),
    "experts balanced for each part of a row": _at(
        "harness.models.sequence.DividedRows.balancing", lambda *_: contextlib.nullcontext,
        "mixtral-sequence2_zero0-fp32-4-2"),
    "another rank's key heads": _at(
        "torch.Tensor.repeat_interleave",
        lambda *_: lambda heads, copies, dimension: torch.cat([heads] * copies, dimension),
        "llama-sequence4_zero1-fp32-2-4"),
    # Tensor parallelism.
    "the gradient of a head's norm not summed": _at(
        "harness.engine.tensor._sum_gradients", lambda *_: lambda *_: None,
        "qwen3-tensor2_zero1-fp32-4-2"),
    "the gradient of divided inputs not summed": _at(
        "harness.engine.residuals.copied", lambda *_: lambda states, group: states,
        "llama-whole_tensor2_zero1-fp32-4-2"),
    "the gradient of gathered inputs not summed": _at(
        "harness.engine.residuals.gathered_for_parts", lambda *_: joined, TENSOR),
    "the norm of every copy": _at(
        "harness.engine.build.note_copies", lambda *_: new.mark_all,
        TENSOR, TENSOR_ZERO3, DIVIDED_STAGES, "llama_tied-pipe2_tensor2_zero0-fp32-2-4"),
    "a part of the vocabulary off by one": _at(
        "harness.engine.tensor.Vocabulary",
        lambda make, _: lambda first, *rest: make(first + 1, *rest), TENSOR, TENSOR_ZERO3),
    "the loss of every tensor rank": _at(
        "harness.layout.grid.GROUPS", lambda *_: {"loss": ()}, TENSOR, DIVIDED_STAGES),
    "the padding row learned": _at(
        "harness.engine.tensor._embedding", new.padding_learned, "phi3-tensor2_zero1-fp32-4-2"),
    "a bias on every tensor rank": _at(
        "harness.engine.tensor._row", new.biased_everywhere, TENSOR_ZERO3),
    "the gradient of a norm not summed": _at(
        "harness.engine.residuals.summed", lambda *_: lambda gradient, group: gradient, TENSOR),
    "dropout of a rank's tokens drawn as if there were no others": _at(
        "harness.engine.residuals.Residuals.dropped", lambda *_: lambda *_: None,
        "gpt2_dropping-tensor2_zero1-fp32-4-2"),
    "dropout drawn by every tensor rank": _at(
        "harness.layout.grid.GROUPS",
        lambda groups, _: {"dropout": (*groups["dropout"], "tensor")},
        "gpt2_dropping-tensor2_zero1-fp32-4-2"),
    "a view that halves the tokens": _at(
        "harness.engine.build.divide_forward", new.heads_undivided, "opt-tensor2_zero1-fp32-4-2"),
    # The chunked loss.
    "the last chunk of the vocabulary dropped": _at(
        "harness.models.chunked_loss._How.columns",
        lambda columns, _: lambda self, vocab_size: iter([*columns(self, vocab_size)][:-1]),
        CHUNKED, CHUNKED_STAGE),
    "a chunk's gradient overwritten": _at(
        "harness.models.chunked_loss._add_summand", lambda *_: new.overwrite,
        CHUNKED, CHUNKED_STAGE),
    "logits of chunks not capped": _at(
        "harness.engine.build.operations_on_logits", lambda *_: lambda *_: (), CHUNKED_STAGE),
    # Expert parallelism.
    "experts averaged over the wrong ranks": _at(
        "deepspeed.initialize", new.averaged_over_the_holders, "mixtral-expert2_zero1-fp32-2-4"),
    "the norm of a rank's own experts": _at(
        "deepspeed.runtime.zero.stage3.pg_utils.is_parallel", lambda *_: lambda *_: False,
        DIVIDED_EXPERTS_ZERO3),
    # For BF16_Optimizer and ZeRO 3, which receive it in different ways.
    "the norm of one tensor rank's part of experts": _at(
        "harness.engine.expert.announce_experts",
        lambda announce, _: lambda model, stage, experts, replicas, parts: announce(
            model, stage, experts, replicas, experts),
        "mixtral_heavy-tensor2_expert2_zero1-bf16-2-4", "mixtral-tensor2_expert2_zero3-fp32-2-4"),
    "a token dropped on its way": _at(
        "harness.engine.expert.reordered", new.token_dropped, DIVIDED_EXPERTS_ZERO3),
    "experts' outputs in another order": _at(
        "harness.engine.expert.reordered", lambda *_: lambda rows, order: rows,
        DIVIDED_EXPERTS_ZERO3),
    # Recomputed activations.
    "kept results in another order": _at(
        "harness.models.recompute.deque", lambda *_: new.Swapped, "llama-selective_zero3-fp32-4-2"),
    "host memory reused for all layers": _at(
        "harness.models.recompute.HostCopy.__init__", new.host_memory_reused,
        "llama-offloaded_zero1-fp32-4-2"),
    "a tile without gradient": _at(
        "harness.models.layer_changes.checkpoint", new.constant_tiles,
        "llama-tiled_zero2-fp32-4-2"),
    # Evaluation.
    "a mean of evaluated batches' means": _at(
        "engine.eval_batch", new.evaluated_means, ZERO1, PIPELINED),
    "the last batch not evaluated": _at(
        "engine.eval_batch",
        lambda evaluate, _: lambda self, batches, *_: evaluate(self, batches[:-1]),
        ZERO1, PIPELINED),
}
# fmt: on

BRIEF = ("gradients x1.00001", "a part of the vocabulary off by one")
"""Planted on every change."""

# Checkpoints.

ZERO1_TO_3 = Trip.of("fp32", "llama", "zero1x2", "zero3x2")
BF16_SAME = Trip.of("bf16", "llama_tied", "zero1x2", "zero1x2")
FROZEN_TO_3 = Trip.of("fp32", FROZEN, "zero1x2", "zero3x2")


def _filling(change: Callable[..., object], trip: Trip) -> Defect:
    """Change how a tensor is read: change(fill, name, kind, offset, out)."""

    def wrap(original: Any, world: World) -> Any:
        def fill(self: Any, name: str, kind: str, offset: int, out: Any, *part: Any) -> None:
            change(lambda *args: original(self, *args, *part), name, kind, offset, out)

        return fill

    return Defect("harness.checkpoint.reader.Reader.fill", wrap, (trip,))


def _restoring(trip: Trip, **sections: dict[str, Any]) -> Defect:
    """Replace sections of the restored scalars."""
    return Defect(
        "harness.engine.state.restore_scalars",
        lambda restore, _: lambda engine, saved: restore(engine, {**saved, **sections}),
        (trip,),
    )


def _loading_without(left_out: Callable[[Any], bool], trip: Trip) -> Defect:
    """Leave out some parameters in loading, but not in saving."""

    def wrap(restore: Any, world: World) -> Any:
        from harness.engine import state

        original = state.pieces

        def places(*args: Any) -> Iterator[Any]:
            return (place for place in original(*args) if not left_out(place.parameter))

        def restoring(*args: Any) -> None:
            with mock.patch.object(state, "pieces", places):
                restore(*args)

        return restoring

    return Defect("harness.engine.state.restore", wrap, (trip,))


# fmt: off
CHECKPOINTS = {
    # Fragments that do not begin a parameter are read one element too early.
    "a fragment's offset off by one": _filling(
        lambda fill, name, kind, offset, out: fill(name, kind, max(0, offset - 1), out),
        ZERO1_TO_3),
    "moments not loaded": _filling(
        lambda fill, name, kind, *rest: kind in (WEIGHT, BUFFER) and fill(name, kind, *rest),
        ZERO1_TO_3),
    "moments swapped": _filling(
        lambda fill, name, kind, *rest: fill(name, new.SWAPPED_MOMENTS.get(kind, kind), *rest),
        ZERO1_TO_3),
    "Adam's step not restored": _restoring(ZERO1_TO_3, optimizer={"step": 0.0}),
    "masters read from bf16 weights": _filling(new.masters_rounded, BF16_SAME),
    # The model computes its first loss with its previous weights.
    "weights not refreshed from the masters": Defect(
        "harness.engine.state.refresh_weights", lambda *_: lambda *_, **__: None, (BF16_SAME,)),
    "the loss scale not restored": _restoring(
        Trip.of("fp16", "llama", "zero1x2", "zero3x2"), loss_scaling={}),
    # No layout saves it.
    "the tied copy of a pipeline not loaded": _loading_without(
        lambda parameter: getattr(parameter, "ds_pipe_replicated", False),
        Trip.of("fp32", "llama_tied", "zero1x2", "pipe2_zero1x2")),
    "frozen weights not loaded": _loading_without(
        lambda parameter: not parameter.requires_grad, FROZEN_TO_3),
    "buffers not loaded": _filling(new.buffers_left_out, FROZEN_TO_3),
}
# fmt: on

# Streams.

UNSYNCHRONIZED = "nothing waits for the device"
STREAMS = {
    UNSYNCHRONIZED: Defect(
        "harness.engine.deepspeed_0_19.gradients.settle_gradients "
        "tests.gates.streams.device.Timeline.synchronize",
        lambda *_: lambda *_, **__: None,
        CONTROLS,
    )
}


def planted(defect: str | None, world: World) -> contextlib.AbstractContextManager[None]:
    """Return the context in which a defect is active; None plants nothing."""
    every = {**PARITY, **CHECKPOINTS, **STREAMS}
    return every[defect].planted(world) if defect else contextlib.nullcontext()
