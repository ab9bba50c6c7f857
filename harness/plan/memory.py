"""The memory estimate of a plan, for known and traced architectures.

torch is not imported here. Another process traces the model class on fake tensors
(models/tracing.py), once per model and micro-batch; the result is kept in the user's cache folder.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from harness.config.ds_json import value_of
from harness.errors import ConfigError
from harness.estimate.hardware import known_gpu
from harness.estimate.inputs import Inputs, LayerTrace, Way, ZeroSettings
from harness.estimate.memory_item import GIB
from harness.estimate.step_time.host import cache_folder
from harness.estimate.timeline import Estimate, division_problems, estimate_memory
from harness.files.paths import REPOSITORY
from harness.layout.shape import Body, Shape, Tensor
from harness.layout.state_size import carried_numbers
from harness.plan.overrides import DROPOUT_ENDINGS
from harness.plan.plan import Draft, Plan

_MODULE = "harness.models.tracing"
_FILES = (
    *("models/tracing.py", "models/state_kernels.py"),
    *("models/recompute.py", "models/loss.py"),
)
_PATIENCE_S = 600


class Untraceable(ValueError):
    """The class cannot be built or run on fake tensors, or torch is not installed."""


@dataclass(frozen=True)
class Traced:
    """A traced model; bytes are for the request's micro-batch."""

    shape: Shape
    layers: tuple[int, ...]
    selective: tuple[int, ...]
    outside: int
    way: Way


def traced(request: dict[str, Any]) -> Traced:
    """Return the trace for a Request of models/tracing.py. Raises Untraceable."""
    answer = _answered(request)
    body, sizes = answer["body"], answer["sizes"]
    sizes["sliding_windows"] = tuple(sizes["sliding_windows"])

    def tensors(rows: list[list[Any]]) -> tuple[Tensor, ...]:
        return tuple(Tensor(name, tuple(size), kind) for name, size, kind in rows)

    made = Body(
        tensors(body["before"]),
        body["layer_prefix"],
        tuple(map(tensors, body["layers"])),
        tensors(body["after"]),
    )
    shape = Shape(**sizes, body=made)
    layers, selective = tuple(answer["layers"]), tuple(answer["selective"])
    return Traced(shape, layers, selective, answer["outside"], answer["way"])


def _answered(request: dict[str, Any]) -> dict[str, Any]:
    if not all(map(importlib.util.find_spec, ("torch", "transformers"))):
        raise Untraceable("tracing its class needs torch and transformers")
    text = json.dumps(request, sort_keys=True)
    path = _kept(text)
    if path is None:
        return _asked(text)
    with _locked(path):
        with contextlib.suppress(OSError, ValueError):
            answer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return answer
        answer = _asked(text)
        with contextlib.suppress(OSError):
            path.write_text(json.dumps(answer), encoding="utf-8")
        return answer


def _asked(text: str) -> dict[str, Any]:
    try:
        done = _tried(text)
    except (OSError, subprocess.TimeoutExpired) as error:  # may succeed the next time
        raise Untraceable(f"its class cannot be traced: {error}") from None
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise Untraceable(f"its class cannot be traced: {last[0]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@cache  # an installed class that cannot be traced is tried once, not by each that asks
def _tried(text: str) -> subprocess.CompletedProcess[str]:
    """Trace in another process, without a GPU."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error"}
    paths = [str(REPOSITORY), environ.get("PYTHONPATH")]
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # "" is the current folder
    command = [sys.executable, "-P", "-m", _MODULE]
    options: Any = {"capture_output": True, "text": True, "timeout": _PATIENCE_S}
    return subprocess.run(command, input=text, env=environ, **options)


def _kept(text: str) -> Path | None:
    """Return the cache file for a result; None if there is no cache folder."""
    made_by = [importlib.metadata.version(name) for name in ("torch", "transformers")]
    made_by += [(REPOSITORY / "harness" / name).read_text(encoding="utf-8") for name in _FILES]
    digest = hashlib.sha256("\0".join([*made_by, text]).encode()).hexdigest()
    try:
        folder = cache_folder() / "traces"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return folder / f"{digest}.json"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let the ranks of a node trace one at a time: the first traces, the others read the result.
    On a file system that is read-only, full or without locks, each traces.
    """
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(OSError):
            lock = opened.enter_context(path.with_suffix(".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def estimate(plan: Plan) -> Estimate | None:
    """Return the memory estimate; None for an architecture that can be neither counted nor traced.

    Raises ConfigError for divisions over ranks that DeepSpeed does not support.
    """
    gpu = known_gpu(plan.world.gpu)
    try:
        inputs = memory_inputs(plan) or traced_inputs(plan)
    except Untraceable:
        return None
    if problems := division_problems(inputs):
        raise ConfigError(problems)
    share = plan.world.ranks_per_gpu
    return estimate_memory(inputs, int(gpu.memory_gib * GIB / share) if gpu else None)


def gathers_layers(plan: Plan) -> bool:
    """Return True if ZeRO 3 gathers a decoder layer as a whole (Inputs.gathers_layers)."""
    if plan.config.model.compile:  # holds for unknown architectures too
        return plan.zero_stage == 3
    inputs = memory_inputs(plan)
    return inputs is not None and inputs.of_stage(0).gathers_layers


def traced_shape(draft: Draft) -> Shape | None:
    """Return the shape that the estimate of an unknown architecture will have; None if its class
    cannot be traced.
    """
    assert draft.batch is not None, "a batch that does not divide is a problem"
    try:
        return traced(_request(draft, draft.batch.micro_batch)).shape
    except Untraceable:
        return None


def _request(made: Draft | Plan, micro_batch: int) -> dict[str, Any]:
    """Return a Request of models/tracing.py."""
    return {
        "config": made.model_config,
        "source": made.model_source,
        "precision": made.precision,
        "attention": made.config.model.attention,
        "micro_batch": micro_batch,
        "seq_len": made.config.data.seq_len,
        "kernels": made.world.kernels,
    }


def traced_inputs(plan: Plan) -> Inputs:
    """Return the inputs for an unknown architecture, traced from its class. Raises Untraceable."""
    whole = traced(_request(plan, plan.micro_batch))
    inputs = memory_inputs(replace(plan, shape=whole.shape))
    assert inputs is not None, "it has a shape"
    tokens = plan.micro_batch * plan.seq_len
    layers, selective = (
        tuple(size / tokens for size in sizes) for sizes in (whole.layers, whole.selective)
    )
    trace = LayerTrace(layers, selective, whole.outside / tokens, whole.way)
    return replace(inputs, trace=trace)


def memory_inputs(plan: Plan) -> Inputs | None:
    """Return the values of a plan that determine its memory; None for an unknown architecture."""
    if plan.shape is None:
        return None
    config, run = plan.model_config, plan.config
    values = (value for key, value in config.items() if key.endswith(DROPOUT_ENDINGS))
    dropouts = (value for value in values if isinstance(value, int | float))
    gpu = known_gpu(plan.world.gpu)
    return Inputs(
        shape=plan.shape,
        zero=ZeroSettings.read(partial(value_of, plan.deepspeed)),
        precision=plan.precision,
        autocast=plan.products != plan.precision,
        grid=plan.grid,
        micro_batch=plan.micro_batch,
        seq_len=run.data.seq_len,
        grad_accum=plan.grad_accum,
        checkpointing=plan.checkpointing,
        activation_offload=run.model.activation_offload,
        mlp_tiles=run.model.mlp_tiles,
        attention=run.model.attention,
        attention_sizes=tuple(run.model.attention_sizes.items()),
        liger=run.model.kernels == "liger",
        compiled=run.model.compile is True,
        float8=run.model.float8 != "none",
        smooths_labels=bool(
            run.train.label_smoothing or run.train.preferences or run.train.loss != "cross_entropy"
        ),
        loss_chunk=run.model.loss_chunk,
        document_mask=bool(run.data.document_mask),
        activation=str(config.get("activation_function") or ""),
        dropout=max(map(float, dropouts), default=0.0),
        loads_weights=run.model.init_from is not None,
        carried_numbers=carried_numbers(config) if run.train.carry_state else 0,
        saves_in_background=run.save.async_,
        rounds_pinned=plan.world.rounds_pinned,
        gpus_per_node=plan.world.local_world_size,
        accelerator=plan.world.accelerator,
        gpu=gpu.key if gpu else None,
        expandable=plan.world.expands_segments,
        rules=tuple(plan.config.optim.groups),
        adapters=plan.config.model.lora.adapters,
        bounds=plan.stages,
        divides_residuals=plan.divides_residuals,
        sends_parts=value_of(plan.deepspeed, "pipeline.pipe_partitioned") is True,
        parallel_residual=config.get("use_parallel_residual") is not False,
    )
