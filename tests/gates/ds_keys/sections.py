"""Every section of the JSON, as the part of DeepSpeed that reads it has it."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from deepspeed.autotuning.config import DeepSpeedAutotuningConfig
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.inference.config import WeightQuantConfig
from deepspeed.module_inject.auto_ep_config import AutoEPConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
from deepspeed.runtime.config import DeepSpeedConfig, HybridEngineConfig, get_pipeline_config
from deepspeed.runtime.data_pipeline.config import get_data_efficiency_config
from deepspeed.runtime.model_checkpointing.config import (
    get_checkpoint_config,
    get_checkpoint_writer_config,
)
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
from pydantic import BaseModel

from tests.gates.ds_keys.nodes import Node, from_annotation, from_model, from_values, plain

_MODELS: dict[str, type[BaseModel]] = {
    "zero_optimization": DeepSpeedZeroConfig,
    "fp16": DeepSpeedFP16Config,
    "bf16": DeepSpeedBF16Config,
    "tensor_parallel": TPTrainingConfig,
    "tensorboard": TensorBoardConfig,
    "wandb": WandbConfig,
    "csv_monitor": CSVConfig,
    "comet": CometConfig,
    "comms_logger": CommsLoggerConfig,
    "compile": CompileConfig,
    "hybrid_engine": HybridEngineConfig,
    "weight_quantization": WeightQuantConfig,
}


class Recorder(dict[str, Any]):
    """A config section that notes which keys a parser asks for, and with which default."""

    def __init__(self, section: Mapping[str, Any] | None = None) -> None:
        super().__init__(section or {})
        self.asked: dict[str, Any] = {}

    def get(self, key: str, default: Any = None) -> Any:
        """As a dict's, and noted."""
        self.asked.setdefault(key, default)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.setdefault(str(key), None)
        return super().__contains__(key)

    def keys(self) -> Any:
        """Itself, so that `in config.keys()` is noted too."""
        return self


def all_sections() -> dict[str, Node]:
    """Return the sections by name; top-level keys are not among them."""
    sections = {name: from_model(model) for name, model in _MODELS.items()}
    hints = typing.get_type_hints(AutoEPConfig)
    expert_parallel = {
        field.name: from_annotation(hints[field.name], plain(field.default))
        for field in dataclasses.fields(AutoEPConfig)
        if not field.name.startswith("_")
    }
    flops, autotuning, checkpoint, writer = (Recorder() for _ in range(4))
    DeepSpeedFlopsProfilerConfig({"flops_profiler": flops})
    DeepSpeedAutotuningConfig({"autotuning": autotuning})
    get_checkpoint_config({"checkpoint": checkpoint})
    get_checkpoint_writer_config({"writer": writer})
    whole = {
        "activation_checkpointing": ACT_CHKPT_DEFAULT,
        "aio": AIO_DEFAULT_DICT,
        "autotuning": autotuning.asked,
        "flops_profiler": flops.asked,
        "pipeline": {**get_pipeline_config({}), "use_reentrant": True},
        "checkpoint": {
            **_asked_by_config("checkpoint"),
            **checkpoint.asked,
            "writer": writer.asked,
            "parallel_write": {"pipeline_stage": False},
        },
        "data_efficiency": get_data_efficiency_config({}),
        "data_types": _asked_by_config("data_types"),
        "torch_autocast": {**_asked_by_config("torch_autocast"), "dtype": None},
        "optimizer": {"type": None, "params": {}, "legacy_fusion": False},
        "scheduler": {"type": None, "params": {}},
    }
    sections |= {name: from_values(name, values) for name, values in whole.items()}
    sections["expert_parallel"] = {"keys": expert_parallel}
    sections["timers"] = {"keys": {"throughput": from_model(DeepSpeedThroughputTimerConfig)}}
    return sections


def _asked_by_config(section: str) -> dict[str, Any]:
    """Keys of one section that DeepSpeedConfig itself asks for."""
    recorder = Recorder()
    DeepSpeedConfig._initialize_params(object.__new__(DeepSpeedConfig), {section: recorder})
    return recorder.asked
