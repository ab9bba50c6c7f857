"""Defects that the gate must catch, planted one at a time around the real engine."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from harness.layout.world import World
from tools.proofs.parity import recipe
from tools.proofs.parity.cells import Cell
from tools.proofs.parity.defects.batches import (
    balance_added,
    batch_means,
    evaluation_with,
    labels_unshifted,
    mean_of_means,
    micro_batch_dropped,
    positions_go_on,
    prompts_trained,
    sample_dropped,
    samples_of_rank_0,
)
from tools.proofs.parity.defects.models import (
    document_mask_dropped,
    key_ignored,
    layers_swapped,
    other_seed,
    tied_gradients_apart,
)
from tools.proofs.parity.defects.seams import Planted, gradients_scaled_by, model_config_with
from tools.proofs.parity.defects.steps import (
    adam_step_off_by_one,
    adam_with,
    clipped_norm_reported,
    group_values,
    json_values,
    masters_rounded,
    moments_forgotten,
    rate_of_first_group,
    rate_of_last_step,
    rate_times_ranks,
    with_l2,
)

_TWO = 2  # ranks
ZERO1 = Cell("llama", "zero1", "fp32", 4, _TWO)
ZERO3 = Cell("llama", "zero3", "fp32", 1, _TWO)
PIPELINED = Cell("llama_tied", "pipe2_zero1", "fp32", 4, _TWO)
BF16 = Cell("llama", "zero1", "bf16", 4, _TWO)
BF16_ZERO3 = Cell("llama", "zero3", "bf16", 4, _TWO)
EXPERTS = Cell("mixtral", "zero2", "fp32", 4, _TWO)
GEMMA = Cell("gemma2", "zero2", "fp32", 4, _TWO)
WINDOW = Cell("mistral", "pipe2_zero0", "fp32", 2, _TWO)
EVERY = (ZERO1, ZERO3, PIPELINED)


@dataclass(frozen=True)
class Defect:
    """A defect and the cells in which it must show."""

    planted: Planted
    cells: tuple[Cell, ...] = EVERY


DEFECTS = {
    "gradients x2": Defect(lambda world: gradients_scaled_by(2.0)),
    "gradients x1.00001": Defect(lambda world: gradients_scaled_by(1.00001)),
    "Adam's step off by one": Defect(adam_step_off_by_one),
    "one sample dropped": Defect(sample_dropped),
    "no clipping": Defect(json_values(lambda config: config.update(gradient_clipping=0.0))),
    "decay on norms": Defect(group_values(lambda g: g.update(weight_decay=recipe.WEIGHT_DECAY))),
    "a dropped attention mask": Defect(document_mask_dropped),
    "a stage's layers in the wrong order": Defect(layers_swapped, (PIPELINED,)),
    "a dropped sum of tied gradients": Defect(tied_gradients_apart, (PIPELINED,)),
    # The learning rate and the optimizer.
    "the learning rate one step late": Defect(rate_of_last_step),
    "the learning rate for the first group only": Defect(rate_of_first_group),
    "the learning rate times the ranks": Defect(rate_times_ranks, (ZERO3,)),
    "eps not passed on": Defect(adam_with(eps=1e-8), (ZERO1, PIPELINED)),
    "betas not passed on": Defect(adam_with(betas=(0.9, 0.999)), (ZERO3,)),
    "L2 for decoupled decay": Defect(json_values(with_l2), (ZERO1,)),
    "no decay": Defect(group_values(lambda g: g.update(weight_decay=0.0)), (ZERO1,)),
    "a rule for parameters ignored": Defect(
        group_values(lambda g: g.update(lr_multiplier=1.0)), (ZERO1, PIPELINED)
    ),
    "moments forgotten": Defect(moments_forgotten, (ZERO1,)),
    "masters in bf16": Defect(masters_rounded, (ZERO1,)),
    "clipping at twice the norm": Defect(
        json_values(lambda config: config.update(gradient_clipping=2 * recipe.CLIP_NORM)), (ZERO3,)
    ),
    "the norm after clipping": Defect(clipped_norm_reported, (ZERO1,)),
    # Sums.
    "sums in bf16": Defect(
        json_values(lambda config: config["data_types"].update(grad_accum_dtype="bf16")),
        (BF16, BF16_ZERO3),
    ),
    "a mean of micro-batches' means": Defect(mean_of_means, (ZERO1, PIPELINED)),
    "a micro-batch dropped": Defect(micro_batch_dropped, (ZERO1, PIPELINED)),
    "balancing losses added up": Defect(balance_added, (EXPERTS,)),
    # Samples.
    "all ranks read the same": Defect(samples_of_rank_0, (ZERO1,)),
    "a loss on prompts": Defect(prompts_trained, (ZERO1,)),
    "labels not shifted": Defect(labels_unshifted, (ZERO3,)),
    "positions across documents": Defect(positions_go_on, (ZERO3,)),
    # The model.
    "another seed": Defect(other_seed, (ZERO3, PIPELINED)),
    "rope_parameters ignored": Defect(key_ignored("rope_parameters"), (ZERO1,)),
    "rms_norm_eps ignored": Defect(key_ignored("rms_norm_eps"), (ZERO3,)),
    "hidden_act ignored": Defect(key_ignored("hidden_act"), (PIPELINED,)),
    "sliding_window ignored": Defect(key_ignored("sliding_window"), (WINDOW,)),
    "query_pre_attn_scalar ignored": Defect(key_ignored("query_pre_attn_scalar"), (GEMMA,)),
    "router_aux_loss_coef ignored": Defect(key_ignored("router_aux_loss_coef"), (EXPERTS,)),
    "dropout on": Defect(lambda w: model_config_with(lambda v: v.update(attention_dropout=0.1))),
    # Evaluation.
    "a mean of evaluated batches' means": Defect(evaluation_with(batch_means), (ZERO1, PIPELINED)),
    "the last batch not evaluated": Defect(
        evaluation_with(lambda engine, batches, evaluate: evaluate(engine, batches[:-1])),
        (ZERO1, PIPELINED),
    ),
}


def planted(defect: str | None, world: World) -> contextlib.AbstractContextManager[None]:
    """The context in which a defect acts; None plants nothing."""
    return DEFECTS[defect].planted(world) if defect else contextlib.nullcontext()
