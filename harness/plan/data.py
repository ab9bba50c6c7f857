"""Checks and defaults of the data in a plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from harness.config.data_section import NEW, REHEARSED, DataConfig
from harness.config.run_config import RunConfig
from harness.errors import ConfigError
from harness.files.chat import read_template
from harness.files.corpus_files import splits_in
from harness.files.splits import ALL
from harness.plan.draft import Draft
from harness.plan.folder import recorded_data
from harness.plan.glances import look_for

_FILE_OF_TEMPLATE = ".jinja"


def keep_split(draft: Draft) -> None:
    """Use the split of the run that is resumed or branched from, unless the user set data.split;
    versions without that key read whole folders. Reads this machine's disk.
    """
    config, recorded = draft.config, recorded_data(draft)
    if recorded is None or config.is_set("data.split"):
        return
    paths = _paths(config.data.model_dump())
    split = recorded.get("split", ALL)
    if not paths or paths != _paths(recorded) or not isinstance(split, str | None):
        return
    if "split" not in recorded and with_eval_splits(config)[1]:
        draft.note("kept", f"data.split is {ALL}, because the resumed run read the entire folder")
    draft.config = config.changed({"data.split": split})


def evaluate_splits(draft: Draft) -> None:
    """Use the other splits of the data as held-out sets, if the run config sets nothing about
    evaluation. Plans for other machines, which may lack the data, skip this.
    """
    if draft.here:
        draft.config, message = with_eval_splits(draft.config)
        if message:
            draft.note("eval_splits", message)


def with_eval_splits(run: RunConfig) -> tuple[RunConfig, str]:
    """Return the run config with its held-out splits in data.eval_path, and a sentence about it; ""
    if there are none or the run config already has a held-out set.
    """
    data = run.data
    if data.path is None or data.mix or data.eval_path or run.is_set("data.held_out"):
        return run, ""
    try:
        splits, chosen = splits_in(data.path, data.format, data.split)
    except (ConfigError, OSError):
        return run, ""  # reading the data reports the problem
    held_out = splits.held_out(chosen) if chosen else []
    if not held_out:
        return run, ""
    verb = "evaluate" if len(held_out) > 1 else "evaluates"
    sets = {split.rpartition("/")[2]: {"path": data.path, "split": split} for split in held_out}
    tree = data.model_dump(exclude_unset=True) | {"eval_path": sets}
    message = (
        f"{data.path} has splits: {chosen} is trained on, {' and '.join(held_out)} {verb} "
        f"(data.eval_path); data.held_out={data.held_out:g} splits documents off instead"
    )
    return run.model_copy(update={"data": DataConfig.model_validate(tree)}), message


def _paths(data: Mapping[str, Any]) -> set[str]:
    """Return the paths that a data section trains on; empty for Python's own library."""
    mix = data.get("mix")
    sources = [data, *(mix if isinstance(mix, list) else ())]
    paths = (source.get("path") for source in sources if isinstance(source, Mapping))
    return {path for path in paths if isinstance(path, str)}


def check_mix(draft: Draft) -> None:
    """Reject a data.mix change at a fraction of a run of unknown length, and a run that rehearses
    itself.
    """
    until, epochs = draft.config.data.mix_until, draft.config.train.epochs
    if until is not None and until < 1 and epochs is not None:
        why = "a fraction of the run, but train.epochs is set"
        draft.problems.add("data.mix_until", why, "give optimizer steps, or train.steps")
    own, rehearse = draft.config.run.dir, draft.config.data.rehearse
    if (
        own is not None
        and rehearse is not None
        and os.path.realpath(own) == os.path.realpath(rehearse)
    ):
        draft.problems.add("data.rehearse", "which is run.dir itself", "name an earlier run")


def check_data(draft: Draft) -> None:
    """Reject a missing chat template and, on this machine, missing data."""
    config, problems = draft.config, list[str]()
    template = config.data.template
    if template is not None and (draft.here or not template.endswith(_FILE_OF_TEMPLATE)):
        problems += _problems_of(lambda: read_template(template))
    if draft.here:  # another machine may have the data
        problems += missing_here(config.data)
        tokenizer = config.data.tokenizer or ""
        if tokenizer.startswith(("/", ".")) and not Path(tokenizer).exists():  # otherwise a hub id
            problems.append(f"data.tokenizer: {tokenizer} does not exist")
    said = [*draft.problems]
    draft.problems.say(*(text for text in dict.fromkeys(problems) if text not in said))


def missing_here(data: DataConfig) -> list[str]:
    """Return a problem for each path of a data section that this machine lacks."""
    problems = list[str]()
    for key, part in _parts(data, problems).items():
        of_part = _problems_of(partial(look_for, part))
        problems += [text.replace("data.path: ", f"{key}: ", 1) for text in of_part]
    return problems


def _parts(data: DataConfig, problems: list[str]) -> dict[str, DataConfig]:
    """Return the data section of each path by key and name, and add problems of data.rehearse."""
    sources = dict[str, DataConfig]()
    problems += _problems_of(lambda: sources.update(data.sources()))
    keys = {"": "data.path", NEW: "data.path", REHEARSED: "data.rehearse"}
    parts = {keys.get(name, f"data.mix {name}"): section for name, section in sources.items()}
    return parts | {
        f"data.eval_path {name}".strip(): section for name, section in data.eval_sets().items()
    }


def _problems_of(read: Callable[[], object]) -> list[str]:
    try:
        read()
    except ConfigError as error:
        return error.problems
    return []
