"""Derives a rehearsal from a real job's plan: layout, model, JSON and run config."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness.config.assignments import assign, flat, value_as_text
from harness.config.ds_json import AUTO, literal, offloaded_to, value_of
from harness.errors import ConfigError
from harness.layout.expert import ExpertPlan
from harness.layout.families import UnknownArchitecture, family_of
from harness.layout.grid import Grid
from harness.layout.shape import Shape
from harness.plan.merge_settings import SAME
from harness.plan.plan import Plan
from tools.rehearsal.shrink import (
    HIDDEN,
    LAYERS,
    VOCAB_SIZE,
    data_keys,
    shrunk,
    size_of,
    write_weights,
)

Device = Literal["cpu", "cuda"]
MOST_RANKS = 4  # unless two data ranks per pipeline stage need more


def grid_of(pipeline: int, data: int, tensor: int = 1, sequence: int = 1) -> Grid:
    """Return the grid with these sizes."""
    return Grid(pipeline * data * tensor * sequence, pipeline, tensor, sequence)


def shown(grid: Grid, noun: str = "rank") -> str:
    """Return a grid as "8 ranks = 2 stages x 4 data"; only the number if all are data ranks."""
    ranks = f"{grid.world_size} {noun}{'s' * (grid.world_size > 1)}"
    if grid.world_size == grid.data:
        return ranks
    sizes = {"stages": grid.pipeline, "data": grid.data}
    sizes |= {"sequence": grid.sequence, "tensor": grid.tensor}
    parts = [f"{n} {name}" for name, n in sizes.items() if n > 1 or name == "data"]
    return f"{ranks} = {' x '.join(parts)}"


def rehearsed(real: Grid, wanted: int | None = None, most: int = MOST_RANKS) -> Grid:
    """Return the grid in which a job of `real` is rehearsed, with `wanted` ranks if given.

    All pipeline stages stay, and up to two tensor and two sequence ranks. Data ranks shrink to fit
    `most` ranks, but never below two if the job has two, so that they exchange data. So 64 GPUs
    become 4 ranks, with 2 stages 2 x 2 and with 4 stages 4 x 2. Raises ConfigError for a number of
    ranks that does not fit.
    """
    stages, tensor, sequence = real.pipeline, min(real.tensor, 2), min(real.sequence, 2)
    each = stages * tensor * sequence
    if wanted is None:
        return grid_of(stages, min(real.data, max(2, most // each)), tensor, sequence)
    if wanted < 1 or wanted % each or wanted // each > real.data:
        raise ConfigError(
            f"--ranks is {wanted}: it must be a multiple of {each} (pipeline stages {stages}, "
            f"sequence ranks {sequence}, tensor ranks {tensor}), from {each} to "
            f"{each * real.data} for --gpus {real.world_size}"
        )
    return grid_of(stages, wanted // each, tensor, sequence)


def elsewhere(grid: Grid, micro_batch: int, grad_accum: int) -> tuple[Grid, int] | None:
    """Return another layout for the same global batch, and its micro-batch: one rank, or two if
    the layout has one.

    The micro-batch stays if possible, since the balancing loss of experts is not linear in it.
    None if a step is one sample, which only one rank can take.
    """
    if grid.world_size > 1:
        return Grid(1), micro_batch
    if grad_accum % 2 == 0:
        return grid_of(1, 2), micro_batch
    return (grid_of(1, 2), micro_batch // 2) if micro_batch % 2 == 0 else None


STEPS = 10  # the signal comes after the first step; the run must not end before it is handled
SEQ_LEN = 32  # tokens
MICRO_BATCH = 2  # samples
_WARMUP_STEPS, _EVERY, _EVAL_SAMPLES, _SAMPLE_TOKENS = 2, 4, 8, 4
_LAYERS_PER_STAGE = 2

# Sizes in the JSON, and the power of the hidden size with which they shrink, so that the small
# model also fills several buckets per step and is partitioned.
_BUCKETS = {"reduce_bucket_size": 2, "allgather_bucket_size": 2}
_OF_STAGE_3 = {
    "sub_group_size": 2,
    "stage3_prefetch_bucket_size": 2,
    "stage3_max_live_parameters": 2,
    "stage3_max_reuse_distance": 2,
    "stage3_param_persistence_threshold": 1,  # compared with the size of a norm's weight
}
_EXPERT_RANKS = "expert_parallel.autoep_size"
_MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet")
# DeepSpeed supports it only on GPUs.
_QUANTISED = tuple(f"zero_optimization.zero_quantized_{kind}" for kind in ("weights", "gradients"))
# Run config keys that a rehearsal sets; JSON keys with the same meaning are removed.
_SHORTENED = ("train.steps", "optim.warmup_steps", "train.global_batch", "train.micro_batch")
# Run config keys that make no sense in a rehearsal or get new values.
_REPLACED = (
    *("model.name", "model.init_from", "model.overrides", "model.context", "model.rope"),
    *("data.path", "data.tokenizer"),
    *("data.mix", "data.eval_path", "data.too_long", "data.min_tokens", "data.max_tokens"),
    *("train.tokens", "train.epochs", "run.dir", "resume.from", "resume.allow"),
    *("ramp", "profile", "optim.groups", "optim.warmup_ratio"),
    *("eval.patience", "eval.better_by"),
    *("eval.seq_len", "eval.needle_lengths", "data.date"),
    *("log.tensorboard", "log.wandb", "log.mlflow", "run.notify", "guard.budget_gpu_hours"),
)


@dataclass(frozen=True)
class Job:
    """The real job's plan, and the small layout in which it is rehearsed."""

    real: Plan
    layout: Grid
    micro_batch: int
    grad_accum: int
    model: dict[str, Any]  # Hugging Face config of the small model
    deepspeed: dict[str, Any]
    trust_remote_code: bool = False
    device: Device = "cpu"

    @classmethod
    def of(
        cls,
        real: Plan,
        ranks: int | None = None,
        trust_remote_code: bool = False,
        device: Device = "cpu",
        most: int = MOST_RANKS,
    ) -> Job:
        """Return the rehearsal of a job, on `ranks` ranks if given, otherwise on about `most`.

        Raises ConfigError for a number of ranks that does not fit, and ValueError for a model that
        cannot be shrunk.
        """
        layout = rehearsed(real.grid, ranks, most)
        split = _split(real)
        layers = sum(split) if split else _LAYERS_PER_STAGE * layout.pipeline
        # A user's tokenizer, or that of the weights, has its own ids.
        has_own = real.config.data.tokenizer or real.config.model.init_from
        vocab_size = 2**31 if has_own else VOCAB_SIZE
        ranks = layout.tensor, layout.sequence
        model = shrunk(real.model_config, layers, vocab_size, *ranks)
        if split:  # its sum must equal the number of layers
            times = -(-(size_of(model, LAYERS) or 1) // sum(split))
            split = [count * times for count in split]
            if sum(split) > (size_of(real.model_config, LAYERS) or 1):
                split = literal(real.deepspeed_given, "pipeline.partition")
            model = shrunk(real.model_config, sum(split), vocab_size, *ranks)
        return cls(
            real=real,
            layout=layout,
            micro_batch=min(real.micro_batch, MICRO_BATCH),
            grad_accum=min(real.grad_accum, max(2, layout.pipeline)),
            model=model,
            deepspeed=_deepspeed(real, layout, model, split),
            trust_remote_code=trust_remote_code,
            device=device,
        )

    @property
    def global_batch(self) -> int:
        """Samples per step."""
        return self.micro_batch * self.grad_accum * self.layout.data

    @property
    def other(self) -> tuple[Grid, int] | None:
        """Layout that resumes the checkpoint, and its micro-batch; None if there is none."""
        return elsewhere(self.layout, self.micro_batch, self.grad_accum)

    @property
    def random_steps(self) -> bool:
        """True if the model uses dropout, which differs with the number of ranks."""
        run = self.real.config.model
        return (
            run.stochastic_depth > 0
            or run.lora.dropout > 0
            or any(
                isinstance(value, int | float) and value > 0
                for key, value in self.model.items()
                if key.endswith(("dropout", "pdrop", "dropout_prob"))
            )
        )

    def write(self, folder: Path) -> list[str]:
        """Write model, JSON and data to `folder`; return train.py's arguments without run.dir.

        Raises ConfigError if the job's data cannot be found.
        """
        (folder / "model").mkdir(parents=True)
        if self._has_adapters:
            write_weights(self.model, folder / "model")
        (folder / "model" / "config.json").write_text(json.dumps(self.model, indent=2))
        (folder / "deepspeed.json").write_text(json.dumps(self.deepspeed, indent=2))
        keys = {**self._kept(), **self._set(), "model.name": str(folder / "model")}
        keys |= {"model.init_from": keys["model.name"]} if self._has_adapters else {}
        keys |= data_keys(self.real, folder)
        arguments = ["--deepspeed", str(folder / "deepspeed.json")]
        arguments += ["--trust-remote-code"] if self.trust_remote_code else []
        return [*arguments, *(f"{key}={value_as_text(value)}" for key, value in keys.items())]

    def at_the_other(self) -> list[str]:
        """Return the additional arguments for the other layout."""
        assert self.other
        layout, micro_batch = self.other
        changed = [f"{key}={value}" for key, value in self._micro_batch(micro_batch).items()]
        if layout.pipeline != self.layout.pipeline:
            changed += [f"ds.pipeline.stages={layout.pipeline}", "ds.pipeline.partition=time"]
        if layout.tensor != self.layout.tensor:
            changed.append(f"ds.tensor_parallel.autotp_size={layout.tensor}")
        if layout.sequence != self.layout.sequence:
            changed.append(f"ds.sequence_parallel_size={layout.sequence}")
        if self.real.grid.expert > 1:
            changed.append(f"ds.{_EXPERT_RANKS}={_expert_ranks(self.model, layout)}")
        return changed

    def not_rehearsed(self) -> list[str]:
        """Return the aspects that only the real machines can show."""
        run, aspects = self.real.config, ["the real size and its memory", "speed"]
        on_cpu = self.device == "cpu"
        aspects = (["CUDA", "NCCL"] if on_cpu else ["links between GPUs"]) + aspects
        aspects += ["the weights of model.init_from"] if run.model.init_from else []
        aspects += ["the checkpoint of resume.from"] if run.resume.from_ else []
        aspects += [run.model.attention] if on_cpu and "flash" in run.model.attention else []
        aspects += ["model.kernels=liger"] if on_cpu and run.model.kernels == "liger" else []
        ds = self.real.deepspeed_given
        aspects += ["ZeRO++'s quantisation"] if any(value_of(ds, k) for k in _QUANTISED) else []
        aspects += [f"the JSON's {name}" for name in _MONITORS if value_of(ds, f"{name}.enabled")]
        aspects += [] if self.other else ["another number of ranks: a step has a single sample"]
        return aspects

    @property
    def _has_adapters(self) -> bool:
        return self.real.config.model.lora.rank is not None

    @property
    def _seq_len(self) -> int:
        return min(self.real.seq_len, SEQ_LEN)

    def _micro_batch(self, samples: int) -> dict[str, int]:
        """Return the keys for this micro-batch."""
        keys = {"train.micro_batch": samples}
        if self.real.config.data.tokens_per_batch is not None:
            keys["data.tokens_per_batch"] = samples * self._seq_len
        return keys

    def _kept(self) -> dict[str, Any]:
        """Return the job's settings that the rehearsal keeps."""
        run = self.real.config
        asked, without = self.real.asked.model, list[str]()
        if self.device == "cpu" or asked.kernels == "auto":
            without.append("model.kernels")
        if asked.compile == "auto":  # it may pay for the job, but not here
            without.append("model.compile")
        replaced = tuple(f"{key}." for key in (*_REPLACED, *without))
        if self.real.attention_why and run.model.attention != "varlen":
            replaced += ("model.attention.",)  # "auto" has the same meaning here
        return {
            key: value
            for key, value in flat(run.model_dump(exclude_unset=True))
            if value is not None and not f"{key}.".startswith(replaced)
        }

    def _set(self) -> dict[str, Any]:
        run = self.real.config
        keys: dict[str, Any] = {
            "data.seq_len": self._seq_len,
            "train.steps": STEPS,
            "train.global_batch": self.global_batch,
            **self._micro_batch(self.micro_batch),
            "optim.warmup_steps": min(run.optim.warmup(STEPS), _WARMUP_STEPS),
            "eval.every": min(run.eval.every, _EVERY),
            "eval.samples": min(run.eval.samples, _EVAL_SAMPLES),
            "save.every": min(run.save.every, _EVERY),
            "save.export": False,  # a separate stage
            "log.every": 1,  # every step is compared
            "sample.tokens": min(run.sample.tokens, _SAMPLE_TOKENS),
        }
        if run.model.attention_global is not None:
            keys["model.attention_global"] = min(run.model.attention_global, self._seq_len)
        if self.device == "cpu" and "flash" in run.model.attention:
            family = family_of(self.model["model_type"])
            keys["model.attention"] = "eager" if family.sdpa_lacks else "sdpa"
        return {**keys, **self._ramp(), **self._groups()}

    def _ramp(self) -> dict[str, int]:
        """Return ramp keys for batch and length: as steep as a few steps allow, within the first
        half.
        """
        ramp, tokens = self.real.config.ramp, STEPS * self.global_batch * SEQ_LEN // 2
        keys = {}
        if ramp.batch_from is not None and self.grad_accum > 1:
            keys["ramp.batch_from"] = keys["ramp.batch_step"] = self.global_batch // self.grad_accum
            keys["ramp.batch_tokens"] = tokens // 2
        seq_len = self._seq_len
        if ramp.length_from is not None and seq_len % 2 == 0:
            keys |= {"ramp.length_from": seq_len // 2, "ramp.length_tokens": tokens // 2}
        return keys

    def _groups(self) -> dict[str, Any]:
        """Return the rules of optim.groups that match a parameter of the small model."""
        try:
            names = [tensor.name for tensor in Shape.from_hf(self.model).tensors()]
        except UnknownArchitecture:
            names = []
        rules = [
            {key: value for key, value in rule.model_dump().items() if value is not None}
            for rule in self.real.config.optim.groups
            if not names or any(re.search(rule.pattern, name) for name in names)
        ]
        return {"optim.groups": rules} if rules else {}


def _expert_ranks(model: dict[str, Any], layout: Grid) -> int:
    """Return the fewest data ranks that can share a model's experts; 1 if each must hold all."""
    return (*ExpertPlan.of(model).legal(layout.data), 1)[1]


def _deepspeed(
    real: Plan, layout: Grid, model: dict[str, Any], split: list[int] | None
) -> dict[str, Any]:
    """Return the job's JSON without size-dependent values and keys that the run config sets."""
    ds = copy.deepcopy(real.deepspeed_given)
    for key in ("gradient_accumulation_steps", *(k for k, r in SAME.items() if r in _SHORTENED)):
        *path, last = key.split(".")
        section: Any = ds
        for name in path:
            section = section.get(name, {})
        section.pop(last, None)
    if "enabled" in ds.get("bf16", {}):  # "auto" means its value on the job's GPUs
        ds["bf16"]["enabled"] = real.precision == "bf16"
    for name in _MONITORS:
        if name in ds:
            ds[name]["enabled"] = False
    changes: dict[str, Any] = {key: False for key in _QUANTISED if value_of(ds, key)}
    if split:
        changes["pipeline.partition"] = split
    if layout.tensor != real.grid.tensor:
        changes["tensor_parallel.autotp_size"] = layout.tensor
    if layout.sequence != real.grid.sequence:
        changes["sequence_parallel_size"] = layout.sequence
    if real.grid.expert > 1:
        changes[_EXPERT_RANKS] = _expert_ranks(model, layout)
    if offloaded_to(ds, "optimizer") == "nvme":  # the job's drive does not exist here
        changes["zero_optimization.offload_optimizer.nvme_path"] = AUTO
    ratio = (size_of(model, HIDDEN) or 1) / (size_of(real.model_config, HIDDEN) or 1)
    sizes = {**_BUCKETS, **(_OF_STAGE_3 if real.zero_stage == 3 else {})}
    for name, power in sizes.items() if real.zero_stage else ():
        key = f"zero_optimization.{name}"
        if real.deepspeed_given.get("zero_optimization", {}).get(name) != AUTO:
            value = value_of(real.deepspeed_given, key)
            changes[key] = min(value, max(1, int(value * ratio**power)))
    for key, value in changes.items():
        assign(ds, key, value)
    return ds


def _split(real: Plan) -> list[int] | None:
    """Return the proportions of layers per stage; None unless the JSON lists counts."""
    counts = literal(real.deepspeed_given, "pipeline.partition")
    return [round(n / min(counts)) for n in counts] if isinstance(counts, list) else None
