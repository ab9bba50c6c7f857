"""Text: each file is a document."""

from collections.abc import Iterator
from pathlib import Path

from harness.files.data_format import BadLines, DataFormat
from harness.files.pieces import Piece, pieces_read

_PROSE = """
txt text md markdown mdx rst adoc asciidoc org tex ltx sty cls bib html htm xhtml xml svg
srt vtt log po pod man texi tokens raw wiki
"""
_CODE = """
py pyi pyx c h cc cpp cxx hh hpp hxx cu cuh java kt kts scala groovy gradle js mjs cjs jsx
ts tsx vue svelte go rs rb php pl pm sh bash zsh fish ps1 bat lua r m mm swift hs ml mli
fs cs vb ex exs erl hrl clj cljs lisp el scm f f90 f95 for asm s v sv vhd vhdl proto
thrift graphql css scss sass less sql tf nix dart zig nim d pas lean awk sed tcl cmake mk
am ac in diff patch yaml yml toml ini cfg conf properties lock
"""


def _pieces(file: Path, _: BadLines) -> Iterator[Piece]:
    """Yield a file's text unchanged, without its byte order mark."""
    with file.open(encoding="utf-8-sig", newline="") as opened:
        yield from pieces_read(opened)


FORMAT = DataFormat(
    name="text",
    suffixes=frozenset({"", *(f".{suffix}" for suffix in f"{_PROSE} {_CODE}".split())}),
    pieces=_pieces,
)
