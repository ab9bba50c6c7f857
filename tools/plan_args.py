"""Command-line arguments shared by tools that plan runs for other machines."""

import argparse
from collections.abc import Iterable

from harness.config.ds_json import PREFIX, load_ds_json
from harness.errors import ConfigError
from harness.files.paths import option_path
from harness.layout.world import STATE_KERNELS, World
from harness.plan.command import DEFAULT_DS_JSON, Command, plan_from
from harness.plan.machine import cluster
from harness.plan.parallelism import num_stages
from harness.plan.plan import Plan

# Flag -> the config key that it sets.
ALIASES = {
    "model": "model.name",
    "micro-batch": "train.micro_batch",
    "seq-len": "data.seq_len",
    "accumulation": "ds.gradient_accumulation_steps",
    "checkpointing": "model.checkpointing",
}
JSON_HELP = "DeepSpeed JSON: a file, or the name of one of ds_configs/."
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for model, config files, machines, batch, and key=value."""
    add = parser.add_argument
    add("--model", help="Preset, config.json, folder or hub id.")
    add_config_arguments(parser)
    add_machine_arguments(parser)
    add("--micro-batch", help="Samples per GPU and forward pass (default: 1).")
    add("--seq-len", help="Tokens per sample.")
    filling = "Micro-batches per step (default: 1; 4 per pipeline stage)."
    add("--accumulation", help=filling)
    add("--checkpointing", help="Layers to recompute: none, selective, full, or every N-th.")


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for both config files and key=value."""
    add, recipe = parser.add_argument, "Run config: a file, or a recipe's name (docs/recipes/)."
    add("--deepspeed", type=option_path, default=DEFAULT_DS_JSON, metavar="JSON", help=JSON_HELP)
    add("--config", type=option_path, metavar="TOML", help=recipe)
    add("assignments", nargs="*", metavar="key=value", help="Settings, as for train.py.")


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the machines that a job is planned for."""
    add = parser.add_argument
    add("--gpus", type=int, default=1, help="Total number of GPUs (default: 1).")
    add("--gpus-per-node", type=int, help="GPUs per node (default: up to 8).")
    add("--gpu", help="GPU type, such as h100-80; without it there is no verdict.")
    add_kernels(parser)


def add_kernels(parser: argparse.ArgumentParser) -> None:
    """Add the argument for packages installed on those machines."""
    parser.add_argument(
        "--kernels",
        nargs="+",
        type=_imported_as,
        choices=STATE_KERNELS,
        default=(),
        metavar="PACKAGE",
        help=f"Installed packages for recurrent layers: {', '.join(STATE_KERNELS)}.",
    )


def _imported_as(package: str) -> str:
    """Return the import name of a package given by its pip name."""
    name = package.replace("-", "_")
    return "fla" if name == "flash_linear_attention" else name


def plan_of(
    args: argparse.Namespace, estimating: bool = False, problems: Iterable[str] = ()
) -> Plan:
    """Return the plan that train.py would make on those machines; `estimating` as in make_plan.

    Raises one ConfigError with all problems, and with `problems` of other arguments.
    """
    found = [*problems]
    try:
        world = world_of(args)
    except ConfigError as error:
        found += error.problems
    if found:
        raise ConfigError(found)
    assignments = (*_given(args), *(f"{k}={v}" for k, v in assumed_batch(args).items()))
    command = Command(
        deepspeed_path=args.deepspeed, config_path=args.config, assignments=assignments
    )
    return plan_from(command, world=world, estimating=estimating)


def world_of(args: argparse.Namespace) -> World:
    """Return the machines as a World. Raises ConfigError with all problems of their arguments."""
    return cluster(args.gpus, args.gpus_per_node, args.gpu, args.kernels)


def assumed_batch(args: argparse.Namespace) -> dict[str, int]:
    """Return defaults of batch keys that neither file nor command line sets: one sample at a time,
    and enough micro-batches to keep pipeline stages busy. With a run config or a global batch there
    are none: the plan chooses.
    """
    assignments = _given(args)
    keys = {text.partition("=")[0] for text in assignments}
    of_json = (text.removeprefix(PREFIX) for text in assignments if text.startswith(PREFIX))
    ds_json, _ = load_ds_json(args.deepspeed, of_json)
    keys |= {key for key in _BATCH_KEYS if ds_json.literal(key) is not None}
    if args.config or {"train.global_batch", "train_batch_size"} & keys:
        return {}
    assumed = {}
    if not {"train.micro_batch", "train_micro_batch_size_per_gpu"} & keys:
        assumed["train.micro_batch"] = 1
    if "gradient_accumulation_steps" not in keys:
        # 4 per stage make the pipeline bubble "negligible" (GPipe, arXiv 1811.06965, section 2.3).
        stages = num_stages(ds_json.tree)
        assumed["ds.gradient_accumulation_steps"] = 4 * stages if stages > 1 else 1
    return assumed


def _given(args: argparse.Namespace) -> list[str]:
    """Return key=value for each flag that is set, followed by the user's assignments."""
    flags = {key: getattr(args, flag.replace("-", "_")) for flag, key in ALIASES.items()}
    return [
        f"{key}={value}" for key, value in flags.items() if value is not None
    ] + args.assignments
