"""Checks and defaults of the data in a plan."""

import os
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import chain, count
from pathlib import Path

from harness.config.data_section import NEW, REHEARSED, DataConfig
from harness.config.run_config import RunConfig
from harness.config.sections import NAME_PATTERN
from harness.errors import ConfigError, Unusable, shortened
from harness.files.chat import read_template
from harness.files.corpus import rows_of
from harness.files.corpus_files import find_files, splits_in
from harness.files.data_format import BadLines
from harness.files.file_kinds import format_of
from harness.files.first_bytes import why_not_utf_8
from harness.files.forms import value_of
from harness.files.token_index import read_header
from harness.plan.plan import Draft

_FILE_OF_TEMPLATE = ".jinja"
_MOST_FILES = 20_000  # of a folder, to see quickly that there is data


def evaluate_splits(draft: Draft) -> None:
    """Evaluate on the other splits of the data, unless the run config sets a held-out set."""
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


def check_mix(draft: Draft) -> None:
    """Reject data.mix_until as a fraction of a run of unknown length, and a run that rehearses
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
        folder = Path(config.data.tokenizer or config.model.init_from or "none")
        texts = [file.read_text(errors="replace") for file in folder.glob("tokenizer_config.json")]
        if f'"name": "{template}"' not in str(texts):  # the tokenizer's own
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
    sources = dict[str, DataConfig]()
    problems = _problems_of(lambda: sources.update(data.sources()))
    keys = {"": "data.path", NEW: "data.path", REHEARSED: "data.rehearse"}
    parts = {keys.get(name, f"data.mix {name}"): part for name, part in sources.items()}
    parts |= {f"data.eval_path {name}".strip(): part for name, part in data.eval_sets().items()}
    for key, part in parts.items():
        missing = _problems_of(partial(_look_for, part))
        problems += [text.replace("data.path: ", f"{key}: ", 1) for text in missing]
    return problems


def _look_for(data: DataConfig) -> None:
    """Raise ConfigError if files of a source are missing, or headers of pairs cannot be read."""
    corpus = find_files(data.path, data.format, _MOST_FILES, data.split)
    try:
        for prefix in corpus.pairs:
            read_header(Path(f"{prefix}.idx"))
    except OSError as error:
        raise ConfigError(f"data.path: cannot read {error.filename}: {error.strerror}") from error
    except Unusable as error:
        raise ConfigError(f"data.path: {error}") from error


def _problems_of(read: Callable[[], object]) -> list[str]:
    try:
        read()
    except ConfigError as error:
        return [*error.problems]
    return []


MOST_VALUES = 64


def balance(draft: Draft) -> None:
    """Replace data.balance by sources, unless the plan is for a machine that may lack the data."""
    if draft.config.data.balance is None or draft.config.data.mix or not draft.here:
        return
    try:
        data, message = balanced(draft.config.data)
    except ConfigError as error:
        draft.problems.say(*error.problems)
        return
    draft.config = draft.config.model_copy(update={"data": data})
    draft.note("balanced", message)


def balanced(data: DataConfig) -> tuple[DataConfig, str]:
    """Return the section with data.mix instead of data.balance, and a sentence about it.

    Reads every record. Raises ConfigError.
    """
    column, path = data.balance, data.path
    assert column is not None, "only a section with the key is balanced"
    assert path is not None, "checked with the section"
    counts = _records_by_value(data, column)
    mix = [
        {"path": path, "name": name, "where": data.where | {column: value}, "share": 1.0}
        for value, name in _names([*counts], [REHEARSED] if data.rehearse else []).items()
    ]
    tree = data.model_dump(exclude_unset=True, exclude={"path", "balance"})
    shown = ", ".join(f"{shortened(value)} {count:,}" for value, count in counts.items())
    message = f"data.balance={column}: sources of equal share, with records: {shown}"
    return DataConfig.model_validate({**tree, "mix": mix}), message


def _records_by_value(data: DataConfig, column: str) -> dict[str, int]:
    """Count the records that match data.where, by value. Raises ConfigError."""
    files, bad_lines, counts = (
        find_files(data.path, data.format, split=data.split),
        BadLines(limit=data.most_bad_rows),
        Counter[str](),
    )
    if files.kind != "text":
        raise ConfigError(f"data.balance is {column!r}, but {files.path} has no columns")
    value_in = partial(value_of, column=column)
    for file in files.files:
        if bad_lines.are_enough:
            break
        records = format_of(file, files.format).records
        if records is None:
            bad_lines.add(file, f"has no columns, but data.balance is {column!r}")
            continue
        try:
            rows = rows_of(file, records(file, bad_lines), bad_lines, data.where, value_in)
            for _, _, value in rows:
                counts[value] += 1
                if len(counts) > MOST_VALUES:
                    raise ConfigError(
                        f"data.balance is {column!r}, which has more than {MOST_VALUES} values, as "
                        f"{', '.join(map(repr, sorted(counts)[:3]))}: name a column of classes"
                    )
        except UnicodeDecodeError as error:
            bad_lines.add(file, f"{error}; it {why_not_utf_8(file)}")
        except OSError as error:
            bad_lines.add(file, str(error))
    bad_lines.require_none()
    if not counts:
        raise ConfigError(f"data.balance is {column!r}, but {files.path} has no record to read")
    return dict(sorted(counts.items()))


def _names(values: list[str], others: list[str]) -> dict[str, str]:
    """Return a source name per value: the value itself if it is a valid name, otherwise a similar
    one, numbered if already taken.
    """
    names = {value: value for value in values if re.fullmatch(NAME_PATTERN, value)}
    used = {*others, *names}
    for value in (text for text in values if text not in names or text in others):
        like = re.sub(r"[^\w.-]", "_", value)[:60] or "none"
        numbered = (f"{like}-{number}" for number in count(2))
        names[value] = next(name for name in chain([like], numbered) if name not in used)
        used.add(names[value])
    return {value: names[value] for value in values}
