"""Held-out splits of the folder that is trained on, as held-out sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.config.data_section import DataConfig
from harness.config.run_config import RunConfig
from harness.errors import ConfigError
from harness.files.corpus_files import splits_in
from harness.files.splits import ALL
from harness.plan.draft import Draft
from harness.plan.folder import recorded_data


def keep_split(draft: Draft) -> None:
    """Read the split of the run that is resumed or branched from, unless the user says; runs of
    versions without data.split read folders whole. Reads this machine's disk.
    """
    config, recorded = draft.config, recorded_data(draft)
    if recorded is None or config.is_set("data.split"):
        return
    paths = _paths(config.data.model_dump())
    split = recorded.get("split", ALL)
    if not paths or paths != _paths(recorded) or not isinstance(split, str | None):
        return
    if "split" not in recorded and with_eval_splits(config)[1]:
        draft.note("kept", f"data.split is {ALL}, as the run that goes on read the whole folder")
    kept = config.data.model_copy(update={"split": split})
    draft.config = config.model_copy(update={"data": kept})


def evaluate_splits(draft: Draft) -> None:
    """Make held-out sets of the splits beside the one that is trained on, where the run config
    says nothing about evaluation. Not for machines elsewhere, which may lack the data.
    """
    if draft.here:
        draft.config, message = with_eval_splits(draft.config)
        if message:
            draft.note("eval_splits", message)


def with_eval_splits(run: RunConfig) -> tuple[RunConfig, str]:
    """Return the run config with its held-out splits in data.eval_path, and a sentence about it;
    "" without any, or if it says what is held out.
    """
    data = run.data
    if data.path is None or data.mix or data.eval_path or run.is_set("data.held_out"):
        return run, ""
    try:
        splits, chosen = splits_in(data.path, data.format, data.split)
    except (ConfigError, OSError):
        return run, ""  # who reads the data names the problem
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
    """Return the paths that a data section trains on; none for Python's own library."""
    mix = data.get("mix")
    sources = [data, *(mix if isinstance(mix, list) else ())]
    paths = (of.get("path") for of in sources if isinstance(of, Mapping))
    return {path for path in paths if isinstance(path, str)}
