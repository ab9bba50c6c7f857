"""The question of a command line: a model, its relatives, its inputs and the machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from harness.config.assignments import value_as_text
from harness.config.ds_json import DsJson
from harness.config.run_config import RunConfig
from harness.config.run_file import load_run_config
from harness.errors import ConfigError
from harness.estimate.hardware import find_gpu, known_gpu
from harness.estimate.held import GIB
from harness.estimate.inputs import Inputs
from harness.estimate.step_time.calibration import Site
from harness.estimate.step_time.job import DISK_GB_PER_S
from harness.estimate.step_time.machine import machine_of, measured, other_machine
from harness.layout.shape import Shape
from harness.layout.world import World
from harness.plan.machine import cluster
from harness.plan.make import make_plan
from harness.plan.memory import Untraceable, memory_inputs, traced_inputs
from harness.plan.plan import Plan
from tools.cluster.count import TOKENS_PER_PARAMETER, Question
from tools.cluster.layouts import STATES, Layout, State, base_json


def scaled(config: Mapping[str, Any], factor: float) -> dict[str, int]:
    """Return the keys to change in a Hugging Face config for a model whose width and depth are so
    many times as large.

    Heads keep their size, experts their number, and so do key heads that several query heads share;
    parameters grow with about the third power of the factor.
    """
    shape = Shape.from_hf(config)
    family, shares = shape.family, shape.num_kv_heads < shape.num_heads
    step = shape.num_kv_heads if shares else 1
    heads = step * max(1, round(factor * shape.num_heads / step))
    width = heads / shape.num_heads
    sizes = {
        "heads": heads,
        "hidden": _multiple(shape.hidden_size * width, shape.hidden_size // shape.num_heads),
        "width": _multiple(shape.intermediate_size * width, 64),
        "layers": max(1, round(shape.num_layers * factor)),
    }
    keys = {family.size_keys(name)[0]: size for name, size in sizes.items()}
    if not shares:
        keys |= {key: heads for key in family.size_keys("kv_heads") if key in config}
    if shape.num_experts and shape.expert_size != shape.intermediate_size:
        keys["moe_intermediate_size"] = _multiple(shape.expert_size * width, 64)
    if family.mlp_ratio:  # four times the hidden size, whatever that is
        keys.pop(family.size_keys("width")[0])
    return keys


def _multiple(size: float, of: int) -> int:
    return of * ceil(size / of - 1e-9)


def question_of(args: argparse.Namespace) -> Question:
    """Return the question. Raises ConfigError with every problem of the command line."""
    run, world = run_of(args), world_of(args)
    if args.quantize and not args.lora:
        raise ConfigError(f"--quantize {args.quantize}: it needs adapters: add --lora 16")
    base = {state: _inputs(args, run, world, state) for state in STATES}
    some = base[STATES[0]]
    # One object: what is kept by shape is then known again without comparing every tensor.
    base = {key: replace(inputs, shape=some.shape) for key, inputs in base.items()}
    machine = machine_of(args.gpu, world.local_world_size, some.precision, args.network)
    planned = find_gpu(args.gpu).key, some.precision
    if args.measured:
        rates = _rates(args.measured)
        gpu = known_gpu(rates.get("gpu"))
        own = gpu.key if gpu else rates.get("gpu"), str(rates.get("precision"))
        _refuse("--measured", args.measured, other_machine(own, planned))
        machine = measured(machine, rates)
    if args.rates:
        site = Site.read(args.rates)
        _refuse("--rates", args.rates, site.problem(*planned))
        machine = site.machine(machine, world.local_world_size)
    return Question(
        base=base,
        machine=machine,
        gpus=args.gpus,
        device_bytes=int(find_gpu(args.gpu).memory_gib * GIB),
        host_bytes=int(host_gib(args, world) * GIB),
        global_batch=args.global_batch,
        data_tokens=args.data_tokens or TOKENS_PER_PARAMETER * some.shape.parameters,
        price=args.price,
        run=run,
        disk_gb_per_s=args.disk or DISK_GB_PER_S,
        refusal=lambda layout: refusal(args, layout),
    )


def _refuse(flag: str, path: Path, why: str | None) -> None:
    if why:
        raise ConfigError(f"{flag} {path}: {why}")


def _rates(path: Path) -> dict[str, Any]:
    try:
        rates = json.loads(path.read_text())["rates"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--measured {path}: not what preflight.py --json prints: {error}"
        ) from None
    if not isinstance(rates, dict):
        raise ConfigError(f"--measured {path}: its rates are no table")
    return rates


def host_gib(args: argparse.Namespace, world: World) -> float:
    """Return the memory of a node's host, GiB: as given, or as such nodes usually have."""
    return args.host_memory or 256.0 * world.local_world_size


def run_of(args: argparse.Namespace, **more: Any) -> RunConfig:
    """Return the run config of a command line with more keys."""
    keys = {"model.name": args.model, "data.seq_len": args.seq_len, **more}
    words = [f"{key}={value_as_text(value)}" for key, value in keys.items()]
    return load_run_config(None, [*words, *args.assignments])


def world_of(args: argparse.Namespace) -> World:
    """Return the cluster. Raises ConfigError for GPUs that are not known, or do not fill nodes."""
    return cluster(args.gpus, args.gpus_per_node, args.gpu, args.kernels)


def plan_of(args: argparse.Namespace, layout: Layout) -> Plan:
    """Return the plan that train.py would make of a layout, adapters left out: they need weights
    that the planner need not have.
    """
    more = {"train.global_batch": args.global_batch, **layout.overrides}
    return make_plan(run_of(args, **more), DsJson(layout.deepspeed, "layout"), world_of(args))


def refusal(args: argparse.Namespace, layout: Layout) -> str:
    """Return why train.py would refuse a layout; "" if it takes it."""
    try:
        plan_of(args, layout)
    except ConfigError as error:
        return str(error.problems[0])
    return ""


def _inputs(args: argparse.Namespace, run: RunConfig, world: World, state: State) -> Inputs:
    alone = run_of(args, **{"train.micro_batch": 1})
    json = {**base_json(state), "gradient_accumulation_steps": 1}
    plan = make_plan(alone, DsJson(json, "layout"), world, estimating=True)
    try:
        inputs = memory_inputs(plan) or traced_inputs(plan)
    except Untraceable as error:
        raise ConfigError(
            f"{run.model.name}: its tensors are not known here, and {error}"
        ) from None
    if not args.lora:
        return inputs
    words = [f"model.lora.rank={args.lora}"]
    words += [f"model.lora.quantize={args.quantize}"] if args.quantize else []
    return replace(inputs, adapters=load_run_config(None, words).model.lora.adapters)
