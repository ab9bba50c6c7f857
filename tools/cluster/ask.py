"""Turns the planner's command line into a question: model, inputs, machine and job."""

import argparse
import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

from harness.config.assignments import COMMAND_LINE, assign_all, value_as_text
from harness.config.ds_json import PREFIX, DsJson
from harness.config.run_config import RunConfig
from harness.config.run_file import load_run_config, with_values
from harness.config.sections import LENGTHS
from harness.errors import ConfigError
from harness.estimate.hardware import find_gpu, known_gpu
from harness.estimate.inputs import Inputs
from harness.estimate.memory_item import GIB
from harness.estimate.step_time.job import DISK_GB_PER_S
from harness.estimate.step_time.machine import machine_of, measured, other_machine
from harness.layout.shape import Shape
from harness.layout.world import World
from harness.plan.duration import read_site
from harness.plan.fine_tuning import continued_rate
from harness.plan.make import make_plan
from harness.plan.memory import Untraceable, memory_inputs, traced_inputs
from harness.plan.model_config import published_weights
from harness.plan.plan import Plan
from tools.cluster.count import TOKENS_PER_PARAMETER, Question
from tools.cluster.layouts import STATES, Layout, State, base_json
from tools.plan_args import world_of

_T = TypeVar("_T")
_FLAGS = {
    "model": "model.name",
    "seq-len": "data.seq_len",
    "global-batch": "train.global_batch",
    "lora": "model.lora.rank",
    "quantize": "model.lora.quantize",
    "init-from": "model.init_from",
}
"""Flags of the planner, and the run config keys that they set."""
_CHOSEN = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("zero_optimization.stage", "zero_optimization.offload_", "zero_optimization.zero_hpz_"),
    *("pipeline", "tensor_parallel", "sequence_parallel_size", "expert_parallel"),
)
"""Beginnings of the JSON's keys that the planner chooses."""
_HOST_GIB = 256.0  # per GPU, on a typical node
_EVALUATIONS = 200
"""Maximum number of evaluations in a job whose config does not set eval.every."""


def question_of(args: argparse.Namespace) -> Question:
    """Return the question that a command line asks. Raises ConfigError, or ValueError for rates."""
    problems = [*_conflicts(args)]

    def valid(read: Callable[[], _T]) -> _T | None:
        try:
            return read()
        except ConfigError as error:
            problems.extend(error.problems)
            return None

    run, world = valid(lambda: run_of(args)), valid(lambda: world_of(args))
    valid(lambda: _with_ds_keys(args, {}))
    # Two sizes of a batch would conflict once more.
    is_clear = not any(text.startswith("train.global_batch") for text in problems)
    base = is_clear and run and world and valid(lambda: _base(args, run, world))
    if problems or not (run and world and base):
        raise ConfigError(dict.fromkeys(problems))
    some = next(iter(base.values()))
    # One shared object: caches keyed by shape then find it without comparing every tensor.
    base = {key: replace(inputs, shape=some.shape) for key, inputs in base.items()}
    machine = machine_of(args.gpu, world.local_world_size, some.products, args.network)
    planned = find_gpu(args.gpu).key, some.precision
    if args.measured:
        rates = _rates(args.measured)
        gpu = known_gpu(rates.get("gpu"))
        own = gpu.key if gpu else rates.get("gpu"), str(rates.get("precision"))
        if why := other_machine(own, planned):
            raise ConfigError(f"--measured {args.measured}: {why}")
        machine = measured(machine, rates)
    if args.rates:
        site = read_site(args.rates)
        if why := site.problem(*planned):
            raise ConfigError(f"--rates {args.rates}: {why}")
        machine = site.machine(machine, world.local_world_size)
    tokens = _tokens(args, run) or TOKENS_PER_PARAMETER * some.shape.parameters
    recipe = _recipe(args, run, tokens, some.shape)
    job = run_of(args, **recipe)
    return Question(
        base=base,
        machine=machine,
        gpus=args.gpus,
        device_bytes=int(find_gpu(args.gpu).memory_gib * GIB),
        host_bytes=int((args.host_memory or _HOST_GIB * world.local_world_size) * GIB),
        global_batch=args.global_batch,
        data_tokens=tokens,
        price=args.price,
        budget=args.budget,
        run=job,
        disk_gb_per_s=args.disk or DISK_GB_PER_S,
        compiles=_compiles(args, world, next(iter(base)), recipe),
        deepspeed=lambda layout: _with_ds_keys(args, layout.deepspeed),
        refusal=lambda layout: refusal(args, layout, job),
    )


def _conflicts(args: argparse.Namespace) -> Iterator[str]:
    """Yield the problems of arguments that the planner takes in another way, or not at all."""
    try:
        own = load_run_config(None, _of_run(args))
    except ConfigError:
        return  # its problems are found again
    for flag, key in _FLAGS.items():
        if own.is_set(key) and getattr(args, flag.replace("-", "_")):
            yield f"{key}: the planner takes it from --{flag}: change that instead"
    if args.data_tokens and any(map(own.is_set, LENGTHS)):
        yield "--data-tokens and train.steps, train.tokens or train.epochs: keep one"
    elif own.train.epochs is not None:
        yield "train.epochs: the planner reads no data: give --data-tokens instead"
    elif own.train.steps == 0:
        yield "train.steps=0 trains on nothing: give --data-tokens instead"
    if args.quantize and not args.lora:
        yield f"--quantize {args.quantize}: it needs adapters: add --lora 16"
    if args.budget and not args.price:
        yield f"--budget {args.budget:g}: it needs the price of a GPU-hour: add --price"


def _base(args: argparse.Namespace, run: RunConfig, world: World) -> dict[State, Inputs]:
    """Return the inputs of each entry of STATES that train.py accepts. Raises the first one's
    ConfigError if there is none.
    """
    base, refused = dict[State, Inputs](), list[ConfigError]()
    for state in STATES:
        try:
            base[state] = _inputs(args, run, world, state)
        except ConfigError as error:
            refused.append(error)
    if not base:
        raise refused[0]
    return base


def _compiles(args: argparse.Namespace, world: World, state: State, recipe: dict[str, Any]) -> bool:
    """Return True if train.py compiles the job's layers where Liger's kernels are not supported."""
    run = run_of(args, **{**recipe, "train.micro_batch": 1})
    if run.model.kernels == "auto":
        run = run.changed({"model.kernels": "none"})
    plan = make_plan(run, DsJson(_json(args, state), "layout"), world, estimating=True)
    return plan.config.model.compile is True


def _json(args: argparse.Namespace, state: State) -> dict[str, Any]:
    """Return the JSON of an entry of STATES, with one micro-batch."""
    return {**_with_ds_keys(args, base_json(state)), "gradient_accumulation_steps": 1}


def _tokens(args: argparse.Namespace, run: RunConfig) -> float:
    """Return the tokens of the job; 0 if the user named no length."""
    if run.train.steps:
        return float(run.train.steps * args.global_batch * args.seq_len)
    return float(args.data_tokens or run.train.tokens or 0)


def _recipe(
    args: argparse.Namespace, run: RunConfig, tokens: float, shape: Shape
) -> dict[str, Any]:
    """Return run config keys that the user left open: length, warm-up, evaluations, and the rate of
    weights that go on pretraining.

    Warm-up: 2,000 steps as in Llama 2 (arXiv 2307.09288), at most 1 % of all steps.
    """
    steps = ceil(tokens / args.global_batch / args.seq_len)
    keys: dict[str, Any] = {}
    if not any(map(run.is_set, LENGTHS)):
        keys["train.tokens"] = ceil(tokens)
    if not (args.lora or run.is_set("optim.warmup_steps") or run.is_set("optim.warmup_ratio")):
        keys["optim.warmup_steps"] = min(2000, ceil(steps / 100))
    if weights_of(args, run) and not (args.lora or run.is_set("optim.lr")):
        keys["optim.lr"] = continued_rate(shape)[0]
    if not run.is_set("eval.every"):
        keys["eval.every"] = max(50, ceil(steps / _EVALUATIONS))
    return keys


def _rates(path: Path) -> dict[str, Any]:
    try:
        rates = json.loads(path.read_text())["rates"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--measured {path}: not what preflight.py --json prints: {error}"
        ) from None
    if not isinstance(rates, dict):
        raise ConfigError(f"--measured {path}: its rates are not a table")
    return rates


def run_of(args: argparse.Namespace, **more: Any) -> RunConfig:
    """Return the run config of a command line, with additional keys."""
    published = published_weights(args.model)
    keys = {
        "model.name": args.model,
        "data.seq_len": args.seq_len,
        "model.lora.rank": args.lora,
        "model.lora.quantize": args.quantize if args.lora else None,
        # A plan needs the shape alone, which the preset has: no hub is asked.
        "model.init_from": args.init_from if args.init_from != published else None,
        **more,
    }
    words = [f"{key}={value_as_text(value)}" for key, value in keys.items() if value is not None]
    return load_run_config(None, [*words, *_of_run(args)])


def _of_run(args: argparse.Namespace) -> list[str]:
    return [text for text in args.assignments if not text.startswith(PREFIX)]


def _with_ds_keys(args: argparse.Namespace, json: dict[str, Any]) -> dict[str, Any]:
    """Return a DeepSpeed JSON with the `ds.` keys of the command line. Raises ConfigError for one
    that is no assignment, or that the planner chooses.
    """
    texts = [text.removeprefix(PREFIX) for text in args.assignments if text.startswith(PREFIX)]
    tree = copy.deepcopy(json)
    assigned, problems = assign_all(tree, texts)
    problems += [
        f"{PREFIX}{key}: the planner chooses it: leave it out"
        for key in assigned
        if key.startswith(_CHOSEN)
    ]
    if problems:
        raise ConfigError(problems)
    return tree


def plan_of(args: argparse.Namespace, layout: Layout, job: RunConfig) -> Plan:
    """Return train.py's plan of a layout."""
    keys = {"train.global_batch": args.global_batch, **layout.overrides}
    return make_plan(
        with_values(job, keys, dict.fromkeys(keys, COMMAND_LINE)),
        DsJson(_with_ds_keys(args, layout.deepspeed), "layout"),
        world_of(args),
    )


def refusal(args: argparse.Namespace, layout: Layout, job: RunConfig) -> str:
    """Return the reason why train.py would reject a layout; "" if it accepts it."""
    try:
        plan_of(args, layout, job)
    except ConfigError as error:
        return str(error.problems[0])
    return ""


def _inputs(args: argparse.Namespace, run: RunConfig, world: World, state: State) -> Inputs:
    alone = run_of(args, **{"train.micro_batch": 1})
    plan = make_plan(alone, DsJson(_json(args, state), "layout"), world, estimating=True)
    try:
        inputs = memory_inputs(plan) or traced_inputs(plan)
    except Untraceable as error:
        raise ConfigError(f"{run.model.name}: its tensors are unknown, and {error}") from None
    return replace(inputs, loads_weights=weights_of(args, run) is not None)


def weights_of(args: argparse.Namespace, run: RunConfig) -> str | None:
    """Return the folder or hub id of the job's weights; None if it starts from random ones."""
    of_model = published_weights(args.model) or args.model if args.lora else None
    return args.init_from or run.model.init_from or of_model
