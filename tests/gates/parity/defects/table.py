"""Defects that the gate must catch, planted one at a time around the real engine."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from harness.layout.world import World
from tests.gates.parity import recipe
from tests.gates.parity.cells import Cell
from tests.gates.parity.defects.batches import (
    balance_added,
    batch_means,
    evaluation_with,
    labels_unshifted,
    last_chunk_dropped,
    logits_as_the_head_gives_them,
    mean_of_means,
    micro_batch_dropped,
    positions_go_on,
    prompts_trained,
    sample_dropped,
    samples_of_rank_0,
    summand_overwritten,
)
from tests.gates.parity.defects.divided import (
    averaged_over_the_holders,
    bias_added_everywhere,
    documents_lost,
    dropout_of_every_rank,
    gradients_not_summed,
    heads_in_another_order,
    heads_undivided,
    inputs_not_summed,
    loss_of_every_tensor_rank,
    mean_of_own_targets,
    norm_of_every_copy,
    norm_of_one_tensor_rank,
    norm_of_own_experts,
    padding_learned,
    parts_balanced,
    positions_of_rank_0,
    rows_as_they_came,
    token_dropped,
    vocabulary_off_by_one,
)
from tests.gates.parity.defects.models import (
    bounds_late,
    document_mask_dropped,
    host_memory_reused,
    key_ignored,
    layers_swapped,
    other_seed,
    results_swapped,
    tied_gradients_apart,
    tied_gradients_of_all_ranks,
    tile_without_gradient,
    windows_lost,
)
from tests.gates.parity.defects.seams import Planted, gradients_scaled_by, model_config_with
from tests.gates.parity.defects.steps import (
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
TENSOR = Cell("llama", "tensor2_zero1", "fp32", 4, _TWO)
TENSOR_ZERO3 = Cell("llama_tied", "tensor2_zero3", "fp32", 4, _TWO)
TENSOR_NORMS = Cell("qwen3", "tensor2_zero1", "fp32", 4, _TWO)
ROWS = Cell("llama", "sequence2_zero1", "fp32", 4, _TWO)
ROWS_OF_EXPERTS = Cell("mixtral", "sequence2_zero0", "fp32", 4, _TWO)
SHARED_HEADS = Cell("llama", "sequence4_zero1", "fp32", 2, 4)
DIVIDED_STAGES = Cell("llama_tied", "pipe2_tensor2_zero1", "fp32", 2, 4)
DIVIDED_STAGES_ZERO0 = Cell("llama_tied", "pipe2_tensor2_zero0", "fp32", 2, 4)
TENSOR_PADDING = Cell("phi3", "tensor2_zero1", "fp32", 4, _TWO)
DIVIDED_EXPERTS = Cell("mixtral", "expert2_zero1", "fp32", 2, 4)
DIVIDED_EXPERTS_ZERO3 = Cell("mixtral", "expert2_zero3", "fp32", 4, _TWO)
TENSOR_DROPOUT = Cell("gpt2_dropping", "tensor2_zero1", "fp32", 4, _TWO)
TENSOR_VIEWS = Cell("opt", "tensor2_zero1", "fp32", 4, _TWO)
TENSOR_EXPERTS_BF16 = Cell("mixtral_heavy", "tensor2_expert2_zero1", "bf16", 2, 4)
TENSOR_EXPERTS_ZERO3 = Cell("mixtral", "tensor2_expert2_zero3", "fp32", 2, 4)
VARLEN = Cell("llama", "varlen_zero0", "fp32", 1, _TWO)
VARLEN_WINDOW = Cell("mistral", "varlen_zero1", "bf16", 4, _TWO)
CHUNKED = Cell("gpt2", "chunked_zero3", "fp32", 4, _TWO)
CHUNKED_STAGE = Cell("gemma2", "chunked_pipe2_zero1", "fp32", 4, _TWO)
SELECTIVE = Cell("llama", "selective_zero3", "fp32", 4, _TWO)
OFFLOADED = Cell("llama", "offloaded_zero1", "fp32", 4, _TWO)
TILED = Cell("llama", "tiled_zero2", "fp32", 4, _TWO)
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
    "a dropped sum of tied gradients": Defect(tied_gradients_apart, (PIPELINED, DIVIDED_STAGES)),
    "tied gradients summed over the wrong ranks": Defect(
        tied_gradients_of_all_ranks, (DIVIDED_STAGES,)
    ),
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
    # Documents by their bounds.
    "bounds of documents off by one": Defect(bounds_late, (VARLEN, VARLEN_WINDOW)),
    "windows within documents ignored": Defect(windows_lost, (VARLEN_WINDOW,)),
    # Divided rows.
    "documents lost across ranks": Defect(documents_lost, (ROWS,)),
    "the positions of the first part of a row": Defect(positions_of_rank_0, (ROWS,)),
    "the mean of a rank without targets": Defect(mean_of_own_targets, (ROWS,)),
    "experts balanced for each part of a row": Defect(parts_balanced, (ROWS_OF_EXPERTS,)),
    "another rank's key heads": Defect(heads_in_another_order, (SHARED_HEADS,)),
    # Divided tensors.
    "the gradient of a head's norm not summed": Defect(gradients_not_summed, (TENSOR_NORMS,)),
    "the gradient of divided inputs not summed": Defect(inputs_not_summed, (TENSOR,)),
    "the norm of every copy": Defect(
        norm_of_every_copy, (TENSOR, TENSOR_ZERO3, DIVIDED_STAGES, DIVIDED_STAGES_ZERO0)
    ),
    "a part of the vocabulary off by one": Defect(vocabulary_off_by_one, (TENSOR, TENSOR_ZERO3)),
    "the loss of every tensor rank": Defect(loss_of_every_tensor_rank, (TENSOR, DIVIDED_STAGES)),
    "the padding row learned": Defect(padding_learned, (TENSOR_PADDING,)),
    "a bias on every tensor rank": Defect(bias_added_everywhere, (TENSOR_ZERO3,)),
    "dropout drawn by every tensor rank": Defect(dropout_of_every_rank, (TENSOR_DROPOUT,)),
    "a view that halves the tokens": Defect(heads_undivided, (TENSOR_VIEWS,)),
    # The loss in chunks.
    "the last chunk of the vocabulary dropped": Defect(
        last_chunk_dropped, (CHUNKED, CHUNKED_STAGE)
    ),
    "a chunk's gradient overwritten": Defect(summand_overwritten, (CHUNKED, CHUNKED_STAGE)),
    "logits of chunks not capped": Defect(logits_as_the_head_gives_them, (CHUNKED_STAGE,)),
    # Divided experts.
    "experts averaged over the wrong ranks": Defect(averaged_over_the_holders, (DIVIDED_EXPERTS,)),
    "the norm of a rank's own experts": Defect(norm_of_own_experts, (DIVIDED_EXPERTS_ZERO3,)),
    # By BF16_Optimizer and by ZeRO 3, which are told in different ways.
    "the norm of one tensor rank's part of experts": Defect(
        norm_of_one_tensor_rank, (TENSOR_EXPERTS_BF16, TENSOR_EXPERTS_ZERO3)
    ),
    "a token dropped on its way": Defect(token_dropped, (DIVIDED_EXPERTS_ZERO3,)),
    "experts' outputs in another order": Defect(rows_as_they_came, (DIVIDED_EXPERTS_ZERO3,)),
    # Activations that are computed again.
    "kept results in another order": Defect(results_swapped, (SELECTIVE,)),
    "host memory reused for all layers": Defect(host_memory_reused, (OFFLOADED,)),
    "a tile without gradient": Defect(tile_without_gradient, (TILED,)),
    # Evaluation.
    "a mean of evaluated batches' means": Defect(evaluation_with(batch_means), (ZERO1, PIPELINED)),
    "the last batch not evaluated": Defect(
        evaluation_with(lambda engine, batches, evaluate: evaluate(engine, batches[:-1])),
        (ZERO1, PIPELINED),
    ),
}

BRIEF = (
    "gradients x1.00001",
    "a stage's layers in the wrong order",
    "a part of the vocabulary off by one",
)
"""Planted with every change."""


def planted(defect: str | None, world: World) -> contextlib.AbstractContextManager[None]:
    """The context in which a defect acts; None plants nothing."""
    return DEFECTS[defect].planted(world) if defect else contextlib.nullcontext()
