"""Properties of DeepSpeed's keys that its parsers do not show."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.config import DtypeEnum
from deepspeed.runtime.constants import GRADIENT_ALLREDUCE_OP_SUPPORTED

# Keys that DeepSpeed reads with a default of None and no annotation to tell their type.
TYPES: dict[str, list[str]] = {
    "train_batch_size": ["integer"],
    "train_micro_batch_size_per_gpu": ["integer"],
    "gradient_accumulation_steps": ["integer"],
    "steps_per_print": ["integer"],
    "vocabulary_size": ["integer"],
    "pipeline.stages": ["integer", "string"],
    "pipeline.use_reentrant": ["boolean"],
    "activation_checkpointing.number_checkpoints": ["integer"],
    "data_types.keep_in_fp32_modules": ["string", "array"],
    "torch_autocast.lower_precision_safe_modules": ["array"],
    "autotuning.arg_mappings": ["object"],
    "autotuning.max_train_batch_size": ["integer"],
    "autotuning.model_info": ["object"],
    "data_efficiency.data_sampling.dynamic_batching.max_batch_size": ["integer"],
    "datastates_ckpt": ["object", "boolean"],
}
# Types that a key has here besides DeepSpeed's: a split over pipeline stages is ours to make, and
# may be given as decoder layers per stage.
WIDENED = {"pipeline.partition": ["array"]}
# Smallest values that DeepSpeed asserts far from its parsers.
MINIMUM = {
    "train_batch_size": 1,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
}
# Values of the strings that DeepSpeed checks in its parsers.
_DTYPES = sorted({name for dtype in DtypeEnum for name in dtype._all_values[1:]})
CHOICES: dict[str, list[str]] = {
    "communication_data_type": ["fp16", "bf16", "fp32"],
    "seq_parallel_communication_data_type": ["fp16", "bf16", "fp32"],
    "gradient_allreduce_op": list(GRADIENT_ALLREDUCE_OP_SUPPORTED),
    "data_types.grad_accum_dtype": _DTYPES,
    "data_types.param_dtype": _DTYPES,
    "data_types.buffer_dtype": _DTYPES,
    "torch_autocast.dtype": _DTYPES,
}
# Keys that the engine reads beside its config class.
READ_ELSEWHERE: dict[str, Any] = {"sequence_parallel_size": 1, "vocabulary_size": None}
# Sections to which a plug-in or the user adds keys of their own.
FREE = (
    "optimizer.params",
    "scheduler.params",
    "data_efficiency.data_sampling.curriculum_learning",
    "data_efficiency.data_sampling.dynamic_batching",
    "data_efficiency.data_routing.random_ltd",
)
