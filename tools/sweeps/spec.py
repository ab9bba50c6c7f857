"""A sweep's file and folder: a run config with [sweep] and [search], and optionally [ds]."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from harness.config.assignments import did_you_mean, flat, value_as_text
from harness.config.ds_json import PREFIX as DS_PREFIX
from harness.config.run_file import read_toml
from harness.config.sections import Count, CountOrZero, PathText, Positive, Section, Text
from harness.errors import ConfigError, worded
from harness.files.paths import RUN_CONFIGS, shipped
from harness.plan.command import DEFAULT_DS_JSON, Command
from tools.sweeps.space import Choice, Dimension, Range, Values, corners, draws, grid, read_space

SEED = "train.seed"
"""The key whose list in [search] repeats every setting."""
_OURS = ("run.dir", "resume.from")  # the sweep sets these for each trial
_QUIET = {"save.export": False, "sample.tokens": 0, "data.reservoir": 0}
"""Defaults of trials, which leave out what only a run to be kept needs."""
MOST_TRIALS = 10_000
_TABLES = ("sweep", "search", "ds")


class PruneSection(Section):
    """Early stopping by successive halving (ASHA, arXiv 1810.05934)."""

    after: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Fraction of its steps that a trial takes before it may be stopped."""
    factor: Annotated[int, Field(ge=2, le=100)] = 3
    """One in this many trials continues past each decision; the next decision comes after this many
    times as many steps."""


class BudgetSection(Section):
    """Limits of all trials together."""

    steps: Count | None = None
    """Optimizer steps."""
    tokens: Count | None = None
    """Tokens read."""
    hours: Positive | None = None
    """Total hours of all trials."""


def _prune(value: object) -> object:
    return {} if value is True else None if value is False else value


class SweepSection(Section):
    """Settings of a sweep: method, trials, limits."""

    name: Annotated[str, Field(pattern=r"^\w[\w.-]{0,63}$")] | None = None
    """Folder of the sweep under runs/; None: the file's name."""
    method: Literal["grid", "random", "tpe"] = "random"
    """grid: all combinations; random; tpe: tree-structured Parzen estimator, which learns from
    earlier trials (arXiv 2304.11127)."""
    trials: Annotated[int, Field(ge=1, le=MOST_TRIALS)] | None = None
    """Number of settings, each of which is trained with every seed of train.seed in [search]; a
    grid determines its own."""
    seed: CountOrZero = 0
    """Random seed for choosing the trials."""
    metric: Text = "eval_loss"
    """Key of metrics.jsonl to minimise: eval_loss or eval_loss/NAME."""
    deepspeed: PathText = str(DEFAULT_DS_JSON)
    """DeepSpeed JSON."""
    config: PathText | None = None
    """Run config on which all trials are based."""
    ranks: Annotated[int, Field(ge=1, le=4096)] = 1
    """Ranks per trial on this machine; with --slurm, its nodes and GPUs determine the ranks."""
    parallel: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of concurrent trials."""
    slurm: dict[str, str | int] = Field(default_factory=dict)
    """Options of sbatch per trial, with --slurm: {nodes = 1, gpus-per-node = 8}."""
    prune: Annotated[PruneSection | None, BeforeValidator(_prune)] = None
    """Early stopping of trials; true for the defaults."""
    budget: BudgetSection = Field(default_factory=BudgetSection)
    """Limits of all trials together."""


@dataclass(frozen=True)
class Sweep:
    """A sweep as its file describes it."""

    path: Path
    tree: Mapping[str, Any]
    """The content of the file."""
    settings: SweepSection
    space: Mapping[str, Dimension]
    """What a setting consists of: the searched keys but train.seed."""
    seeds: tuple[str, ...]
    """Values of train.seed with which every setting is trained; ("",) if it is not searched."""
    fixed: tuple[str, ...]
    """key=value of what all trials share."""

    @property
    def folder(self) -> Path:
        """Folder of the sweep."""
        return Path("runs") / (self.settings.name or self.path.stem)

    @property
    def number_of_settings(self) -> int:
        """Number of settings, including those that will be stopped early."""
        if self.settings.method == "grid":
            return math.prod(len(dimension.grid()) for dimension in self.space.values())
        assert self.settings.trials is not None
        return self.settings.trials

    @property
    def number_of_trials(self) -> int:
        """Number of trials: every setting with every seed."""
        return self.number_of_settings * len(self.seeds)

    def choices(self) -> Iterator[Choice | None]:
        """Yield each trial's values; None for those that earlier trials decide."""
        settings: Iterable[Choice | None] = [None] * self.number_of_settings
        if self.settings.method == "grid":
            settings = grid(self.space)
        elif self.settings.method == "random":
            settings = draws(self.space, self.number_of_settings, self.settings.seed)
        for setting, seed in itertools.product(settings, self.seeds):
            yield setting if setting is None else self.with_seed(setting, seed)

    def with_seed(self, setting: Choice, seed: str) -> Choice:
        """Return the values of a trial: those of its setting and its seed."""
        return {**setting, SEED: seed} if seed else setting

    def examples(self) -> Iterator[Choice]:
        """Yield values whose plans show every problem that a trial could have."""
        if self.settings.method == "tpe":
            return (self.with_seed(corner, self.seeds[0]) for corner in corners(self.space))
        return (choice for choice in self.choices() if choice is not None)

    def command(self, choice: Choice, run_dir: Path | None = None) -> Command:
        """Return a trial's train.py command; without `run_dir`, the command for a user."""
        own = [f"{key}={value}" for key, value in choice.items()]
        if run_dir is not None:
            own.append(f"run.dir={run_dir}")
            keys = {key for key, _ in flat(self.tree)}
            quiet = {key: value for key, value in _QUIET.items() if key not in keys}
            own += [f"{key}={value_as_text(value)}" for key, value in quiet.items()]
        config = self.settings.config
        return Command(
            Path(self.settings.deepspeed),
            None if config is None else Path(config),
            (*self.fixed, *own),
        )

    def folder_of(self, number: int) -> Path:
        """Return a trial's run folder."""
        return self.folder / f"trial-{number:03}"


def read_sweep(path: Path, problems: list[str]) -> Sweep:
    """Return the valid part of a sweep's file; append its problems.

    Raises ConfigError if the file cannot be read.
    """
    path = shipped(path, RUN_CONFIGS)
    tree, origin = read_toml(path, "sweep"), str(path)
    for name in _TABLES:
        if not isinstance(tree.get(name, {}), dict):
            problems.append(worded(name, tree.pop(name), origin, f"it must be a table, [{name}]"))
    settings = _settings(tree.get("sweep", {}), origin, problems)
    space = read_space(tree.get("search"), settings.method == "grid", origin, problems)
    of_run = {name: value for name, value in tree.items() if name not in _TABLES}
    of_ds = flat(tree.get("ds", {}))
    fixed = dict(flat(of_run)) | {f"{DS_PREFIX}{key}": value for key, value in of_ds}
    for key in _OURS:
        problems += [f"{key} is set for each trial ({origin}): remove it"] * (
            key in {*fixed, *space}
        )
    for key in space.keys() & fixed.keys():
        problems.append(f"{key} is in [search] as well ({origin}): remove one of them")
    if settings.method == "grid" and settings.trials is not None:
        why = "a grid has as many trials as points: remove it"
        problems.append(worded("sweep.trials", settings.trials, origin, why))
    if settings.method != "grid" and settings.trials is None:
        if "trials" not in tree.get("sweep", {}):  # a wrong number has been named
            problems.append(f"sweep.trials is missing ({origin}): set it, as in trials = 20")
        settings = settings.model_copy(update={"trials": 1})
    seeds = _seeds(space, settings.method, origin, problems)
    fixed_words = tuple(f"{key}={value_as_text(v)}" for key, v in fixed.items() if key not in _OURS)
    sweep = Sweep(path, tree, settings, space, seeds, fixed_words)
    if space and sweep.number_of_trials > MOST_TRIALS:
        problems.append(
            f"[search] ({origin}) is a sweep of {sweep.number_of_trials:,} trials, more than "
            f'{MOST_TRIALS:,}: use fewer, or sweep.method = "random"'
        )
        sweep = replace(sweep, space={key: space[key] for key in [*space][:1]})
    return sweep


def _seeds(
    space: dict[str, Dimension], method: str, origin: str, problems: list[str]
) -> tuple[str, ...]:
    """Take train.seed out of the space; return its values."""
    seeds = space.pop(SEED, None)
    if isinstance(seeds, Range):
        problems.append(
            f"search.{SEED} is a range ({origin}): every setting is trained with each seed of a "
            "list, such as [0, 1, 2]"
        )
    elif seeds is not None and not space and method != "grid":
        problems.append(
            f"[search] ({origin}) has only {SEED}, so that all settings are the same: use "
            'sweep.method = "grid"'
        )
    return seeds.values if isinstance(seeds, Values) else ("",)


def _settings(table: dict[str, Any], origin: str, problems: list[str]) -> SweepSection:
    """Return the [sweep] table, without its invalid keys."""
    try:
        return SweepSection.model_validate(table)
    except ValidationError as error:
        errors = error.errors()
    tables: dict[str, type[Section]] = {
        "": SweepSection,
        "prune.": PruneSection,
        "budget.": BudgetSection,
    }
    names = [f"sweep.{at}{key}" for at, part in tables.items() for key in part.model_fields]
    for item in errors:
        key = ".".join(map(str, ("sweep", *item["loc"])))
        if item["type"] == "extra_forbidden":
            problems.append(f"{key} ({origin}) is not a key of a sweep{did_you_mean(key, names)}")
        else:
            must_be = item["msg"].replace("Input should be", "it must be")
            problems.append(worded(key, item["input"], origin, must_be))
    bad = {item["loc"][0] for item in errors}
    return SweepSection.model_validate({k: v for k, v in table.items() if k not in bad})


_MAY_CHANGE = ("sweep.trials", "sweep.parallel", "sweep.budget.", "sweep.name")


def keep_file(sweep: Sweep) -> None:
    """Create the folder and copy the sweep's file into it.

    Raises ConfigError if another sweep is there, with every key that differs.
    """
    copy = sweep.folder / "sweep.toml"
    if copy.exists():
        before, now = _compared(read_toml(copy)), _compared(sweep.tree)
        problems = [
            worded(key, now.get(key), str(sweep.path), f"but {before.get(key)!r} in {copy}")
            for key in {**before, **now}
            if before.get(key) != now.get(key)
        ]
        if problems:
            raise ConfigError([*problems, f"{copy} belongs to another sweep: set sweep.name"])
    sweep.folder.mkdir(parents=True, exist_ok=True)
    if sweep.path.resolve() != copy.resolve():
        copy.write_bytes(Path(sweep.path).read_bytes())


def _compared(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in flat(tree) if not key.startswith(_MAY_CHANGE)}
