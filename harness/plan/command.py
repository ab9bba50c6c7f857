"""The command line of train.py and of tools that plan a run: argv -> Command -> Plan."""

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from harness.config.assignments import did_you_mean
from harness.config.ds_json import PREFIX as DS_PREFIX
from harness.config.ds_json import load_ds_json
from harness.config.run_config import RunConfig, keys_as_text, known_keys
from harness.config.run_file import load_run_config
from harness.errors import ConfigError
from harness.files.paths import REPOSITORY, option_path, script
from harness.layout.world import World
from harness.plan.machine import cluster
from harness.plan.make import make_plan, refuse
from harness.plan.model_config import preset_names, presets_as_text
from harness.plan.plan import Plan
from harness.terminal import command_parser, say

DEFAULT_DS_JSON = REPOSITORY / "ds_configs" / "zero1.json"

_EXAMPLES = """\
examples:
  deepspeed harness/train.py --deepspeed ds_configs/zero3.json
  torchrun --nproc-per-node 2 harness/train.py train.steps=300 optim.lr=1e-3
  python harness/train.py --dry-run --config run.toml model.name=llama-1b
  python harness/train.py --dry-run --gpus 64 --gpu h100-80 model.name=llama-3-8b
  srun python harness/train.py --deepspeed ds_configs/zero2.json run.dir=runs/first
  deepspeed harness/train.py ds.zero_optimization.stage=2 ds.bf16.enabled=auto

key=value sets a key of the run config, ds.key.sub=value one of the DeepSpeed JSON; values are
TOML, a bare word is a string. Precedence: default < --config file < command line.
"""


@dataclass(frozen=True)
class Command:
    """The parsed command line, before any file is opened."""

    deepspeed_path: Path = DEFAULT_DS_JSON
    config_path: Path | None = None
    assignments: tuple[str, ...] = ()
    dry_run: bool = False
    json: bool = False
    show: int = 0
    trust_remote_code: bool = False
    local_rank: int | None = None
    gpus: int | None = None
    gpus_per_node: int | None = None
    gpu: str | None = None

    def elsewhere(self) -> World | None:
        """Return the cluster of a dry run; None for this machine. Raises ConfigError."""
        if self.gpus is None and self.gpu is None:
            return None
        return cluster(self.gpus or 1, self.gpus_per_node, self.gpu)

    def words(self) -> list[str]:
        """Return config files and assignments as arguments of train.py."""
        config = [] if self.config_path is None else ["--config", str(self.config_path)]
        return ["--deepspeed", str(self.deepspeed_path), *config, *self.assignments]


def parse_command(argv: Sequence[str] | None = None) -> Command:
    """Parse the command line; argparse exits with code 2 and a message for unknown options.

    `--local_rank`, which launchers add, is accepted in both spellings.
    """
    about = "Train a decoder language model with DeepSpeed."
    examples = _EXAMPLES.replace("harness/train.py", script("harness/train.py"))
    parser, add = command_parser(about, prog="train.py", epilog=examples, allow_abbrev=False)
    json_of = "DeepSpeed JSON: a file, or the name of one of ds_configs/ (default: zero1.json)"
    add("--deepspeed", type=option_path, default=DEFAULT_DS_JSON, metavar="JSON", help=json_of)
    toml_of = "run config: a file, or the name of a recipe (docs/recipes/)"
    add("--config", action="append", type=option_path, default=[], metavar="TOML", help=toml_of)
    dry = "print the plan and exit with 0, 3 if it does not fit; needs no device"
    add("--dry-run", action="store_true", help=dry)
    add("--json", action="store_true", help="with --dry-run: print one JSON object")
    show = "with --dry-run: also show the first N examples of the data, learned tokens marked"
    add("--show", type=int, default=0, metavar="N", help=show)
    add("--gpus", type=int, help="with --dry-run: number of GPUs to plan for")
    add("--gpu", help="with --dry-run: GPU type to plan for, such as h100-80")
    add("--gpus-per-node", type=int, help="with --dry-run: GPUs per node (default: up to 8)")
    add("--keys", action="store_true", help="list every key of the run config with its default")
    presets = "list every model.name that needs no files, or those with WORD in their names"
    add("--presets", nargs="?", const="", metavar="WORD", help=presets)
    trust = "run model code that comes with a hub repository"
    add("--trust-remote-code", action="store_true", help=trust)
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    keys = "run config keys, or ds.* keys of the DeepSpeed JSON"
    add("assignments", nargs="*", metavar="key=value", help=keys)
    options, unknown = parser.parse_known_intermixed_args(argv)
    if options.keys or options.presets is not None:
        text = keys_as_text() if options.keys else presets_as_text(word := options.presets)
        if not text:
            parser.error(f"--presets {word}: no name has that{did_you_mean(word, preset_names())}")
        say(text)
        parser.exit()
    if unknown:
        names = re.findall(r"--[\w-]+", parser.format_usage())
        hints = (f"{word}{_hint(word.partition('=')[0], names)}" for word in unknown)
        parser.error(f"unrecognized arguments: {', '.join(hints)}")
    if len(options.config) > 1:  # users expect them to be merged
        both = " and ".join(map(str, options.config))
        parser.error(f"--config is given twice, {both}: use one")
    of_dry_runs = ("gpus", "gpu", "gpus_per_node", "json", "show")
    given = [name for name in of_dry_runs if getattr(options, name) not in (None, False, 0)]
    if given and not options.dry_run:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        parser.error(f"only a dry run takes {flags}: add --dry-run")
    if options.show < 0:
        parser.error(f"--show {options.show}: it must be at least 1")
    if options.gpus_per_node is not None and options.gpus is None:
        parser.error(f"--gpus-per-node {options.gpus_per_node}: add --gpus, the number of all GPUs")
    config_path = next(iter(options.config), None)
    others = {each.name: getattr(options, each.name) for each in fields(Command)[3:]}
    return Command(options.deepspeed, config_path, tuple(options.assignments), **others)


_LAUNCHERS = ("--num_", "--master_", "--include", "--exclude", "--hostfile", "--bind_")


def _hint(option: str, options: list[str]) -> str:
    """Return a hint for an unknown option."""
    if option.startswith(_LAUNCHERS):
        return " (a launcher option: put it before harness/train.py)"
    name = option.lstrip("-").replace("-", "_")
    keys = [key for key in known_keys() if name in (key, key.rpartition(".")[2])]
    if keys:
        return f" (write {keys[0]}=VALUE)"
    begun = next((name for name in options if option.startswith(name)), None)
    return f"; did you mean {begun}?" if begun else did_you_mean(option, options)


def plan_from(
    command: Command,
    environ: Mapping[str, str] = os.environ,
    world: World | None = None,
    estimating: bool = False,
) -> Plan:
    """Read both files and make the plan. Raises one ConfigError with every problem of both.

    `world` replaces the environment's, for plans of other machines; `estimating` as in `make_plan`.
    """
    problems: list[str] = []
    run = RunConfig()
    of_run = [text for text in command.assignments if not text.startswith(DS_PREFIX)]
    of_ds = [text for text in command.assignments if text.startswith(DS_PREFIX)]
    try:
        run = load_run_config(command.config_path, of_run)
    except ConfigError as error:
        problems += error.problems
    ds, ds_problems = load_ds_json(
        command.deepspeed_path, (text.removeprefix(DS_PREFIX) for text in of_ds)
    )
    problems += ds_problems
    here = world is None
    try:
        world = world or World.from_environ(environ)
    except ValueError as error:
        raise ConfigError([*problems, str(error)]) from None
    if problems:
        refuse(ds, world, problems)
    return make_plan(run, ds, world, estimating=estimating, here=here)
