"""Terminal output: wraps text and help to the width, and colours verdicts. Standard library only.

Pipes and files get the text unchanged, so that it can be searched.
"""

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, TextIO

COLUMNS = 80
"""Width assumed for a terminal that does not report one."""
_LEAST = 20
_RED, _YELLOW, _GREEN, _PLAIN = "\x1b[31;1m", "\x1b[33m", "\x1b[32m", "\x1b[0m"
# Only in text that tools write: words of a corpus or a model are not verdicts.
_VERDICTS = (
    (_RED, re.compile(r"^cannot [a-z]+(?=:)|\bdoes not fit\b|\bFAIL(?:ED)?\b|^(?:diverged)\b")),
    (_YELLOW, re.compile(r"(?<=\s)warn(?=\s{2})|(?<=: )tight(?=:)|(?<=\s)tight(?= <-|$)")),
    (_GREEN, re.compile(r"(?<=\s)(?:ok|held)(?=\s{2})|(?<=: )ok to start\b|\bcan hold it$")),
)
# The start of a line before its text: a label and spaces, or a number.
_LABEL = re.compile(r"\s*(?:\d+\. |-> |\S+(?: \S+)*  +)")


def columns(stream: TextIO) -> int | None:
    """Return the current width of a terminal; None if the stream is not a terminal."""
    if not stream.isatty():
        return None
    try:
        width = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        width = 0
    return max(width or COLUMNS, _LEAST)


def wrapped(text: str, width: int) -> str:
    """Return text wrapped between words, with hanging indents after labels and numbers."""
    return "\n".join(part for line in text.split("\n") for part in _wrapped_line(line, width))


def _wrapped_line(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    label = _LABEL.match(line)
    indent = len(label[0]) if label else len(line) - len(line.lstrip()) + 2
    if indent > 0.3 * width:
        indent = 4
    parts = textwrap.wrap(
        line,
        width,
        subsequent_indent=" " * indent,
        replace_whitespace=False,
        break_long_words=False,  # so that paths can be copied
        break_on_hyphens=False,
    )
    return parts or [""]


def coloured(text: str) -> str:
    """Return a text with its verdicts in colour."""
    lines = []
    for line in text.split("\n"):
        for colour, verdict in _VERDICTS:
            line = verdict.sub(rf"{colour}\g<0>{_PLAIN}", line)
        lines.append(line)
    return "\n".join(lines)


def takes_colour(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Return True for a terminal, unless NO_COLOR (no-color.org) is set or the terminal is dumb."""
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


Parts = list[tuple[str, bool]]
"""Parts of a text, each with True if it is learned."""


def marked(parts: Parts, *, color: bool, most: int = sys.maxsize) -> str:
    """Return parts on one line, learned ones green (`color`) or in «», each with the middle left
    out if it is longer than `most` characters.
    """
    opens, closes = (_GREEN, _PLAIN) if color else ("«", "»")
    texts = []
    for text, is_learned in parts:
        if (more := len(text) - most) > 0:
            text = f"{text[: most // 2]} ... {more:,} characters ... {text[-most // 2 :]}"
        plain = repr(text)[1:-1]
        texts.append(f"{opens}{plain}{closes}" if is_learned else plain)
    return "".join(texts)


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a text and flush the stream. If its reader is gone, as after `| head`, nothing more is
    shown, and the run goes on.
    """
    stream = stream or sys.stdout
    if (width := columns(stream)) is not None:
        text = wrapped(text, width)
        if takes_colour(stream):
            text = coloured(text)
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        silence(stream)


def silence(stream: TextIO) -> None:
    """Discard what is written to a stream from now on. Text left in its buffer would otherwise
    change Python's exit code.
    """
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        os.dup2(nowhere.fileno(), stream.fileno())


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Fills the paragraphs of a command's description to the width, and keeps its examples.

    Examples are indented. A comment that does not fit beside its command stands above it.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        _, _, verb = self._prog.partition(" ")
        if verb:  # of the installed command, which launch/verbs.py started
            text = text.replace(f"python tools/{verb.replace('-', '_')}.py", self._prog)
        paragraphs = text.strip().split("\n\n")
        return "\n\n".join(_help_paragraph(paragraph, width) for paragraph in paragraphs)


def command_parser(
    about: str | None, **options: Any
) -> tuple[argparse.ArgumentParser, Callable[..., argparse.Action]]:
    """Return the parser of a command, whose docstring is its help, and what adds its arguments."""
    parser = argparse.ArgumentParser(description=about, formatter_class=HelpFormatter, **options)
    return parser, parser.add_argument


def _help_paragraph(text: str, width: int) -> str:
    lines = re.sub(r" \\\n *", " ", text).split("\n")  # a command of several lines is one
    if not any(line.startswith(" ") for line in lines):
        return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
    shown = []
    has_room = all(len(line) <= width for line in lines if "  # " in line)
    for line in lines:
        command, _, comment = line.partition("  # ")
        if comment and not has_room:
            indent = line[: len(line) - len(line.lstrip())]
            shown += [f"{indent}# {comment}", command.rstrip()]
        elif re.match(r" *\S+(?: \S+)*  ", line):
            shown += _wrapped_line(line, width)
        else:
            shown += wrapped_command(line, width)
    return "\n".join(shown)


def wrapped_command(line: str, width: int) -> list[str]:
    """Return a command as lines that a shell takes as one; options stay beside their values."""
    if len(line) <= width:
        return [line]
    joined = re.sub(r" (--\S+) (?!-)", " \\1\0", line)
    *parts, last = (part.replace("\0", " ") for part in _wrapped_line(joined, width - 2))
    return [*(f"{part} \\" for part in parts), last]
