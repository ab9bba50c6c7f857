"""Held-out splits of the folder that is trained on, as held-out sets."""

from __future__ import annotations

from harness.config.data_section import DataConfig
from harness.config.run_config import RunConfig
from harness.errors import ConfigError
from harness.files.corpus_files import splits_in
from harness.plan.draft import Draft


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
