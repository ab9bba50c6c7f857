"""data.balance: the values of a column as sources with equal shares."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from itertools import chain, count

from harness.config.data_section import REHEARSED, DataConfig
from harness.config.sections import NAME_PATTERN
from harness.errors import ConfigError, shortened
from harness.files.corpus_files import find_files
from harness.files.data_format import BadLines
from harness.files.file_kinds import format_of
from harness.files.first_bytes import why_not_utf_8
from harness.files.forms import value_of
from harness.files.rows import rows_of
from harness.plan.draft import Draft

MOST_VALUES = 64


def balance(draft: Draft) -> None:
    """Replace data.balance by sources. Plans for other machines, which may lack the data,
    keep it.
    """
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
