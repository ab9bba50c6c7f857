"""RunConfig: what is trained and how. The DeepSpeed JSON says how training is distributed.

Precedence: default < TOML file < `key=value` on the command line. Values of `key=value` are parsed
as TOML; a bare word that is not TOML is a string. A run length on the command line also replaces
the file's (`train.steps=10` beats `tokens = ...`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, PrivateAttr

from harness.config.assignments import did_you_mean
from harness.config.batch import Curriculum
from harness.config.data_section import DataConfig
from harness.config.model_section import ModelConfig
from harness.config.optim_and_schedule import OptimConfig
from harness.config.sections import (
    EvalConfig,
    GuardConfig,
    LayoutConfig,
    LogConfig,
    OwnConfig,
    PlanConfig,
    ProfileConfig,
    RampConfig,
    ResumeConfig,
    RunFolderConfig,
    SampleConfig,
    SaveConfig,
    Section,
    TrainConfig,
    help_texts,
    key_of,
)
from harness.errors import worded


class RunConfig(Section):
    """The run config, divided into sections."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    ramp: RampConfig = Field(default_factory=RampConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    save: SaveConfig = Field(default_factory=SaveConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    profile: ProfileConfig = Field(default_factory=ProfileConfig)
    sample: SampleConfig = Field(default_factory=SampleConfig)
    layout: LayoutConfig = Field(default_factory=LayoutConfig)
    guard: GuardConfig = Field(default_factory=GuardConfig)
    plan: PlanConfig = Field(default_factory=PlanConfig)
    run: RunFolderConfig = Field(default_factory=RunFolderConfig)
    resume: ResumeConfig = Field(default_factory=ResumeConfig)
    own: OwnConfig = Field(default_factory=OwnConfig)

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def curriculum(self) -> Curriculum:
        """Batch size and sequence length over the run; the ramp.* keys must be valid."""
        ramp, seq_len = self.ramp, self.data.seq_len
        return Curriculum(
            global_batch=self.train.global_batch,
            batch_from=ramp.batch_from,
            batch_step=ramp.batch_step,
            batch_samples=-(-(ramp.batch_tokens or 0) // seq_len),
            most_pieces=seq_len // (ramp.length_from or seq_len),
            length_samples=-(-(ramp.length_tokens or 0) // seq_len),
        )

    def get(self, key: str) -> Any:
        """Return the value of a dotted key: get("optim.lr")."""
        value = self.model_dump()
        for name in key.split("."):
            value = value[name]
        return value

    def is_set(self, key: str) -> bool:
        """Return True if the user set this dotted key, in the file or on the command line."""
        section: Any = self
        for name in key.split("."):
            if name not in {key_of(field) for field in section.model_fields_set}:
                return False
            section = getattr(section, name, None)
        return True

    def origin(self, key: str) -> str:
        """Return the origin of a dotted key's value: "run.toml", "command line", "default"."""
        return origin_of(key, self._origins) or "default"

    def origins(self) -> dict[str, str]:
        """Return the origin of every value that the user set, by dotted key."""
        return dict(self._origins)

    def changed(self, values: Mapping[str, Any]) -> RunConfig:
        """Return a copy with other values of dotted keys ("data.packing"), without checking them.

        Origins are kept. Keys are named as fields in Python (save.async_).
        """
        changes: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            section, _, name = key.partition(".")
            changes.setdefault(section, {})[name] = value
        sections = {
            name: getattr(self, name).model_copy(update=update) for name, update in changes.items()
        }
        return self.model_copy(update=sections)

    def with_origins(self, origins: Mapping[str, str]) -> RunConfig:
        """Return a copy with these origins."""
        copy = self.model_copy()
        copy._origins = dict(origins)
        return copy


FIRST_KEYS = (
    "model.name",
    "model.init_from",
    "data.path",
    "data.seq_len",
    "train.steps",
    "train.global_batch",
    "optim.lr",
    "eval.every",
    "save.every",
    "run.dir",
)
"""Keys that a first run typically sets."""


RECORDED_KEYS = ("precision", "model_config", "data_fingerprint", "data_mixture", "run.code")
"""Keys of plan.json that a resumed run compares, besides those of the run config."""


def allow_problems(run: RunConfig) -> list[str]:
    """Return the problems of resume.allow: words that name nothing that a resumed run compares."""
    names = [*{".".join(key.split(".")[:2]): 0 for key in known_keys()}, *RECORDED_KEYS, "probe"]
    why = "which no resumed run compares"
    return [
        worded("resume.allow", key, run.origin("resume.allow"), f"{why}{hint or _NAMED}")
        for key in run.resume.allow
        if key not in names and not key.startswith("own.")
        for hint in [did_you_mean(".".join(key.split(".")[:2]), names)]
    ]


_NAMED = ": name each key, as in optim.lr,data.path"


def run_and_step(text: str) -> tuple[Path, int | None]:
    """Return the run folder and the step in RUN or RUN@STEP; None means the newest step."""
    run, at, step = text.rpartition("@")
    if at and run and re.fullmatch(r"[0-9]{1,8}", step):
        return Path(run).expanduser(), int(step)
    return Path(text).expanduser(), None


def run_instead(path: Path) -> str:
    """Return the RUN or RUN@STEP that is meant by a place in a run, its folder of checkpoints or
    one of these, and by RUN@ with a word; "" for other paths.
    """
    run, step = path.parent, path.name.removeprefix("step-")
    if run.name == "checkpoints" and step.isdecimal():
        return f"{run.parent}@{int(step)}"
    named = Path(str(path).rpartition("@")[0])
    is_in_run = path.name == "checkpoints" or not path.exists()
    runs = (named, *((run,) if is_in_run else ()))
    return next((str(each) for each in runs if (each / "plan.json").is_file()), "")


def origin_of(key: str, origins: Mapping[str, str]) -> str:
    """Return the origins of a key, of the keys inside it and of the table around it, as text."""
    places = (
        origin
        for other, origin in origins.items()
        if f"{other}.".startswith(f"{key}.") or f"{key}.".startswith(f"{other}.")
    )
    return ", ".join(dict.fromkeys(places))


def known_keys() -> list[str]:
    """Return every dotted key of the run config, in order."""
    return [key for key, *_ in _fields(RunConfig)]


def keys_as_text() -> str:
    """Return one line per key with its default and meaning: first those for a first run, then all
    keys by section.
    """
    lines = {key: _described(key, owner, name) for key, owner, name in _fields(RunConfig)}
    parts = ["Start with:", *(lines[key] for key in FIRST_KEYS)]
    for name, section in RunConfig.model_fields.items():
        kind: Any = section.annotation
        parts += ["", f"[{name}] {_purpose(kind)}"]
        parts += [lines[key] for key, *_ in _fields(kind, f"{name}.")]
    return "\n".join(parts)


def _described(key: str, section: type[Section], name: str) -> str:
    default = section.model_fields[name].get_default(call_default_factory=True)
    return f"{key} = {default!r}".ljust(36) + f"  {help_texts(section)[name]}"


def _purpose(section: type[Section]) -> str:
    """Return the first paragraph of a section's docstring."""
    return " ".join((section.__doc__ or "").split("\n\n")[0].split())


def _fields(section: type[Section], prefix: str = "") -> Iterator[tuple[str, type[Section], str]]:
    """Yield each dotted key in a section, with the (sub)section and the name of its field."""
    for name, field in section.model_fields.items():
        key, kind = f"{prefix}{key_of(name)}", field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from _fields(kind, f"{key}.")
        else:
            yield key, section, name
