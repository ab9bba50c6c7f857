"""A real job's plan, and the rehearsal that is made of it: layout, model, JSON and run config."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config.assignments import assign, flat, value_as_text
from harness.config.ds_json import AUTO, literal, offloaded_to, value_of
from harness.config.run_config import run_and_step
from harness.data.corpus import find_corpus
from harness.errors import ConfigError
from harness.files.splits import ALL, TO_EVALUATE
from harness.layout.expert import ExpertPlan
from harness.layout.families import UnknownArchitecture, family_of
from harness.layout.grid import Grid
from harness.layout.shape import Shape
from harness.plan.adopt import SAME
from harness.plan.plan import Plan
from harness.runfolder import RunFolder
from tools.rehearsal.shrink import HIDDEN, LAYERS, excerpt, shrunk, size_of

MOST_RANKS = 4  # unless there are more pipeline stages than two data ranks leave room for


@dataclass(frozen=True)
class Layout:
    """Ranks of a rehearsal: pipeline stages x data x sequence x tensor ranks."""

    stages: int
    data: int
    tensor: int = 1
    sequence: int = 1

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.stages * self.data * self.tensor * self.sequence

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        product = grid_product(Grid(self.ranks, self.stages, self.tensor, self.sequence))
        return f"{ranks} = {product}" if product else ranks


def grid_product(grid: Grid) -> str:
    """Return a grid as "2 stages x 4 data x 2 tensor"; "" if it has data ranks alone."""
    if grid.world_size == grid.data:
        return ""
    sizes = {"stages": grid.pipeline, "data": grid.data}
    sizes |= {"sequence": grid.sequence, "tensor": grid.tensor}
    return " x ".join(f"{n} {name}" for name, n in sizes.items() if n > 1 or name == "data")


def rehearsed(real: Grid, wanted: int | None = None) -> Layout:
    """The layout that a job of `real` is rehearsed in; with `wanted` ranks where that is given.

    All pipeline stages stay, and two tensor or sequence ranks of more. Data ranks go: down to
    MOST_RANKS ranks, but never below two where the job has two, for whatever is exchanged between
    them. So 64 GPUs are 4 ranks, in 2 stages 2 x 2 and in 4 stages 4 x 2. Raises ConfigError for a
    number that is no such layout.
    """
    stages, tensor, sequence = real.pipeline, min(real.tensor, 2), min(real.sequence, 2)
    each = stages * tensor * sequence
    if wanted is None:
        return Layout(stages, min(real.data, max(2, MOST_RANKS // each)), tensor, sequence)
    if wanted < 1 or wanted % each or wanted // each > real.data:
        legal = [str(n * each) for n in range(1, real.data + 1)]
        shown = f"1 to {legal[-1]}" if each == 1 < real.data else ", ".join(legal[:4])
        divided = [f"{stages} pipeline stages"] * (stages > 1)
        divided += [f"{sequence} sequence ranks"] * (sequence > 1)
        divided += [f"{tensor} tensor ranks"] * (tensor > 1)
        within = f" in {' x '.join(divided)}" if divided else ""
        raise ConfigError(
            f"--ranks is {wanted}: a job of --gpus {real.world_size}{within} is rehearsed on "
            f"{shown}"
        )
    return Layout(stages, wanted // each, tensor, sequence)


def elsewhere(layout: Layout, micro_batch: int, grad_accum: int) -> tuple[Layout, int] | None:
    """Another layout that the same global batch divides over, and its micro-batch.

    Undivided tensors and rows; where they are, half the data ranks; where there is one, half the
    stages; where there is one, two ranks. The micro-batch stays where it can, since a balancing
    loss of experts is not linear in it. None where a step is one sample, which only one rank can
    take.
    """
    stages, data = layout.stages, layout.data
    if layout.tensor * layout.sequence > 1:
        return Layout(stages, data), micro_batch
    if data > 1:
        return Layout(stages, 1 if data % 2 else data // 2), micro_batch
    if stages > 1:
        return Layout(1 if stages % 2 else stages // 2, 1), micro_batch
    if grad_accum % 2 == 0:
        return Layout(1, 2), micro_batch
    if micro_batch % 2 == 0:
        return Layout(1, 2), micro_batch // 2
    return None


STEPS = 10  # the signal comes after the first; a run must not end before it is heard
SEQ_LEN = 32  # tokens
VOCAB_SIZE = 8192  # of the tokenizer that is trained where none is given
MICRO_BATCH = 2  # samples
_WARMUP_STEPS, _EVERY, _EVAL_SAMPLES, _SAMPLE_TOKENS = 2, 4, 8, 4
_LAYERS_PER_STAGE = 2

# Sizes that are to mean to the small model what they mean to the large: by how often the hidden
# size is their factor. What the JSON leaves out is DeepSpeed's default, as in the job.
_SIZES = {
    "reduce_bucket_size": 2,
    "allgather_bucket_size": 2,
}
_SIZES_OF_STAGE_3 = {
    "sub_group_size": 2,
    "stage3_prefetch_bucket_size": 2,
    "stage3_max_live_parameters": 2,
    "stage3_max_reuse_distance": 2,
    "stage3_param_persistence_threshold": 1,  # what a norm's vector is compared with
}
_EXPERT_RANKS = "expert_parallel.autoep_size"
_MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet")
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# Keys of the run config that a rehearsal sets, or that make no sense in one.
_REPLACED = (
    *("model.name", "model.init_from", "model.overrides", "data.path", "data.tokenizer"),
    *("data.mix", "data.eval_path", "data.too_long", "data.min_tokens", "data.max_tokens"),
    *("train.tokens", "train.epochs", "run.dir", "resume.from", "resume.allow"),
    *("ramp", "profile", "optim.groups", "optim.warmup_ratio"),
    *("eval.patience", "eval.better_by"),
    *("eval.seq_len", "eval.needle_lengths", "data.date"),
    *("log.tensorboard", "log.wandb", "log.mlflow"),
)


@dataclass(frozen=True)
class Job:
    """The real job's plan, and the small layout in which it is rehearsed."""

    real: Plan
    layout: Layout
    micro_batch: int
    grad_accum: int
    model: dict[str, Any]
    """Hugging Face config of the small model."""
    deepspeed: dict[str, Any]
    trust_remote_code: bool = False

    @classmethod
    def of(cls, real: Plan, ranks: int | None = None, trust_remote_code: bool = False) -> Job:
        """The rehearsal of a job; on so many `ranks` where that is given.

        Raises ConfigError for a number of ranks that is no such layout, ValueError for a model that
        cannot be shrunk.
        """
        layout = rehearsed(real.grid, ranks)
        split = _split(real)
        layers = sum(split) if split else _LAYERS_PER_STAGE * layout.stages
        # A tokenizer of the user's brings its own ids.
        vocab_size = VOCAB_SIZE if _tokenizer(real) is None else 2**31
        model = shrunk(real.model_config, layers, vocab_size)
        if split:  # whose sum must be the number of layers, exactly
            times = -(-(size_of(model, LAYERS) or 1) // sum(split))
            split = [count * times for count in split]
            if sum(split) > (size_of(real.model_config, LAYERS) or 1):
                split = literal(real.deepspeed_given, "pipeline.partition")
            model = shrunk(real.model_config, sum(split), vocab_size)
        return cls(
            real=real,
            layout=layout,
            micro_batch=min(real.micro_batch, MICRO_BATCH),
            grad_accum=min(real.grad_accum, max(2, layout.stages)),
            model=model,
            deepspeed=_deepspeed(real, layout, model, split),
            trust_remote_code=trust_remote_code,
        )

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.micro_batch * self.grad_accum * self.layout.data

    @property
    def other(self) -> tuple[Layout, int] | None:
        """Layout that resumes the checkpoint, and its micro-batch; None if there is none."""
        return elsewhere(self.layout, self.micro_batch, self.grad_accum)

    @property
    def random_steps(self) -> bool:
        """True if dropout is on, which other ranks draw differently."""
        return self.real.config.model.stochastic_depth > 0 or any(
            isinstance(value, int | float) and value > 0
            for key, value in self.model.items()
            if key.endswith(("dropout", "pdrop", "dropout_prob"))
        )

    def write(self, folder: Path) -> list[str]:
        """Put model, JSON and data under `folder`; returns train.py's arguments but for run.dir.

        Raises ConfigError where the job's data cannot be found.
        """
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "config.json").write_text(json.dumps(self.model, indent=2))
        (folder / "deepspeed.json").write_text(json.dumps(self.deepspeed, indent=2))
        keys = {**self._kept(), **self._set(), "model.name": str(folder / "model")}
        keys |= _data(self.real, folder)
        arguments = ["--deepspeed", str(folder / "deepspeed.json")]
        arguments += ["--trust-remote-code"] if self.trust_remote_code else []
        return [*arguments, *(f"{key}={value_as_text(value)}" for key, value in keys.items())]

    def at_the_other(self) -> list[str]:
        """Return the additional arguments for the other layout."""
        assert self.other
        layout, micro_batch = self.other
        changed = [f"train.micro_batch={micro_batch}"]
        if layout.stages != self.layout.stages:
            changed += [f"ds.pipeline.stages={layout.stages}", "ds.pipeline.partition=time"]
        if layout.tensor != self.layout.tensor:
            changed.append(f"ds.tensor_parallel.autotp_size={layout.tensor}")
        if layout.sequence != self.layout.sequence:
            changed.append(f"ds.sequence_parallel_size={layout.sequence}")
        if self.real.grid.expert > 1:
            changed.append(f"ds.{_EXPERT_RANKS}={_expert_ranks(self.model, layout)}")
        return changed

    def not_rehearsed(self) -> list[str]:
        """Return the aspects that only the real machines can show."""
        run, aspects = self.real.config, ["CUDA", "NCCL", "the real size and its memory", "speed"]
        aspects += ["the weights of model.init_from"] if run.model.init_from else []
        aspects += ["the checkpoint of resume.from"] if run.resume.from_ else []
        aspects += [run.model.attention] if "flash" in run.model.attention else []
        ds = self.real.deepspeed_given
        aspects += ["ZeRO++'s quantisation"] if any(value_of(ds, k) for k in _QUANTISED) else []
        aspects += [
            f"the JSON's {name}"
            for name in _MONITORS
            if value_of(self.real.deepspeed_given, f"{name}.enabled")
        ]
        aspects += [] if self.other else ["another number of ranks: a step is a single sample"]
        return aspects

    def _kept(self) -> dict[str, Any]:
        """Return the job's settings that the rehearsal keeps."""
        settings = flat(self.real.config.model_dump(exclude_unset=True))
        return {
            key: value
            for key, value in settings
            if value is not None
            and not f"{key}.".startswith(tuple(f"{r}." for r in _REPLACED))
            and not (key == "model.attention" and self._takes_a_mask_by_default)
        }

    @property
    def _takes_a_mask_by_default(self) -> bool:
        """True if model.attention=auto stands for what it stands for here."""
        return bool(self.real.attention_why) and self.real.config.model.attention != "varlen"

    def _set(self) -> dict[str, Any]:
        run = self.real.config
        keys: dict[str, Any] = {
            "data.seq_len": min(run.data.seq_len, SEQ_LEN),
            "train.steps": STEPS,
            "train.global_batch": self.global_batch,
            "train.micro_batch": self.micro_batch,
            "optim.warmup_steps": min(run.optim.warmup(STEPS), _WARMUP_STEPS),
            "eval.every": min(run.eval.every, _EVERY),
            "eval.samples": min(run.eval.samples, _EVAL_SAMPLES),
            "save.every": min(run.save.every, _EVERY),
            "save.export": False,  # a stage of its own
            "log.every": 1,  # every step is compared
            "sample.tokens": min(run.sample.tokens, _SAMPLE_TOKENS),
        }
        if "flash" in run.model.attention:
            family = family_of(self.model["model_type"])
            keys["model.attention"] = "eager" if family.sdpa_lacks else "sdpa"
        return {**keys, **self._ramp(), **self._groups()}

    def _ramp(self) -> dict[str, int]:
        """As steep a rise of batch and length as a few steps allow, within the first half."""
        ramp, tokens = self.real.config.ramp, STEPS * self.global_batch * SEQ_LEN // 2
        keys = {}
        if ramp.batch_from is not None and self.grad_accum > 1:
            keys["ramp.batch_from"] = keys["ramp.batch_step"] = self.global_batch // self.grad_accum
            keys["ramp.batch_tokens"] = tokens // 2
        seq_len = min(self.real.config.data.seq_len, SEQ_LEN)
        if ramp.length_from is not None and seq_len % 2 == 0:
            keys |= {"ramp.length_from": seq_len // 2, "ramp.length_tokens": tokens // 2}
        return keys

    def _groups(self) -> dict[str, Any]:
        """The rules of optim.groups that fit a parameter of the small model, too."""
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


def _expert_ranks(model: dict[str, Any], layout: Layout) -> int:
    """Return the fewest data ranks that can share a model's experts; 1 if one must hold all."""
    return (*ExpertPlan.of(model).legal(layout.data), 1)[1]


def _deepspeed(
    real: Plan, layout: Layout, model: dict[str, Any], split: list[int] | None
) -> dict[str, Any]:
    """The job's JSON, without what depends on its size; what the run config owns is said there."""
    ds = copy.deepcopy(real.deepspeed_given)
    owned = (*_BATCH_KEYS, *(k for k, run in SAME.items() if run in _SHORTENED))
    for key in owned:
        *path, last = key.split(".")
        section: Any = ds
        for name in path:
            section = section.get(name, {})
        section.pop(last, None)
    if "enabled" in ds.get("bf16", {}):  # "auto" is what it is on the job's GPUs
        ds["bf16"]["enabled"] = real.precision == "bf16"
    if split:
        ds["pipeline"]["partition"] = split
    if layout.tensor != real.grid.tensor:
        assign(ds, "tensor_parallel.autotp_size", layout.tensor)
    if layout.sequence != real.grid.sequence:
        assign(ds, "sequence_parallel_size", layout.sequence)
    if real.grid.expert > 1:
        assign(ds, _EXPERT_RANKS, _expert_ranks(model, layout))
    for name in _MONITORS:
        if name in ds:
            ds[name]["enabled"] = False
    for key in _QUANTISED:
        if value_of(ds, key):
            assign(ds, key, False)
    if offloaded_to(ds, "optimizer") == "nvme":  # the job's drive is not here
        assign(ds, "zero_optimization.offload_optimizer.nvme_path", AUTO)
    for key, value in _scaled_sizes(real, model):
        assign(ds, key, value)
    return ds


# DeepSpeed does it on GPUs alone.
_QUANTISED = tuple(f"zero_optimization.zero_quantized_{kind}" for kind in ("weights", "gradients"))


_SHORTENED = ("train.steps", "optim.warmup_steps", "train.global_batch", "train.micro_batch")


def _scaled_sizes(real: Plan, model: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """So that the small model, too, fills several buckets a step, and is partitioned at all."""
    was, now = size_of(real.model_config, HIDDEN), size_of(model, HIDDEN)
    assert was
    assert now
    sizes = {**_SIZES, **(_SIZES_OF_STAGE_3 if real.zero_stage == 3 else {})}
    for name, power in sizes.items() if real.zero_stage else ():
        key = f"zero_optimization.{name}"
        written = real.deepspeed_given.get("zero_optimization", {}).get(name)
        if written != AUTO:
            value = value_of(real.deepspeed_given, key)
            yield key, min(value, max(1, int(value * (now / was) ** power)))


def _split(real: Plan) -> list[int] | None:
    """Layers per stage in proportion, where the JSON lists them."""
    counts = literal(real.deepspeed_given, "pipeline.partition")
    return [round(n / min(counts)) for n in counts] if isinstance(counts, list) else None


def _tokenizer(real: Plan) -> str | None:
    """The job's; a model that brings its weights brings its tokenizer, a run keeps it apart."""
    source = real.config.model.init_from
    if real.config.data.tokenizer or source is None:
        return real.config.data.tokenizer
    folder = RunFolder(run_and_step(source)[0]).tokenizer_dir
    return str(folder) if folder.is_dir() else source


def _data(real: Plan, folder: Path) -> dict[str, Any]:
    """The first part of the job's data, its tokens kept with the rehearsal; and its tokenizer."""
    keys: dict[str, Any] = {}
    data = real.config.data

    def first(path: str, name: str, format: str | None, split: str | None) -> dict[str, Any]:
        shown = excerpt(path, folder / "data" / name, format, split)
        if find_corpus(shown, format, split=ALL).path.is_relative_to(folder):
            keys["data.cache_dir"] = str(folder / "cache")
        if shown != path:  # a copy of the files of the split alone
            split = ALL
        return {"path": shown, **({} if split in (None, TO_EVALUATE) else {"split": split})}

    if data.vocab_size < VOCAB_SIZE:
        keys["data.vocab_size"] = data.vocab_size
    if data.path is not None:
        own = first(data.path, "", data.format, data.split)
        keys |= {f"data.{key}": value for key, value in own.items()}
    if data.mix:  # without limits: the beginnings of the sources have fewer samples
        keys["data.mix"] = [
            {
                **source.model_dump(
                    exclude_none=True, exclude={"epochs", "min_tokens", "max_tokens"}
                ),
                "name": source.label,
                **first(
                    source.path,
                    source.label,
                    source.format or data.format,
                    source.split or data.split,
                ),
            }
            for source in data.mix
        ]
    sets: dict[str, Any] = {}
    for name, of in data.eval_path.items():
        shown = first(of.path, f"sets/{name}", of.format or data.format, of.split or TO_EVALUATE)
        changes = {"split": None, **shown, "min_tokens": None, "max_tokens": None}
        sets[name] = of.model_copy(update=changes).model_dump()
    if sets:
        keys["data.eval_path"] = sets[""] if isinstance(sets.get(""), str) else sets
    if (tokenizer := _tokenizer(real)) is not None:
        keys["data.tokenizer"] = tokenizer
    return keys
