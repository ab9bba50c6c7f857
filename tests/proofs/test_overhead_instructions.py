"""Instructions are read from callgrind's files, all of them and each where it was executed."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tools.proofs.count_instructions import rows
from tools.proofs.overhead.instructions import STEPS, Place, read_profile

# Names are spelled out once; what a call took inside comes after it, and is counted there.
PROFILE = """# callgrind format
version: 1
thread: {thread}
positions: line
events: Ir
summary: 0

ob=(1) /usr/lib/libc.so.6
fl=(1) malloc.c
fn=(1) malloc
10 40
+3 2
cob=(2) /usr/lib/libtorch.so
cfn=(2) add
calls=7 20
* 900
ob=(2)
fn=(2)
20 900

totals: {total}
"""


@pytest.mark.parametrize("thread", [1, 4])
def test_each_instruction_is_counted_where_it_was_executed(thread: int) -> None:
    main = thread == 1
    assert read_profile(PROFILE.format(thread=thread, total=942)) == {
        Place("libc.so.6", main): 42,
        Place("libtorch.so", main): 900,
    }


def test_instructions_that_were_not_read_are_an_error() -> None:
    with pytest.raises(ValueError, match="942 instructions were read, of 943"):
        read_profile(PROFILE.format(thread=1, total=943))


@pytest.mark.skipif(not shutil.which("valgrind"), reason="needs valgrind")
def test_callgrinds_own_file_is_read_whole(tmp_path: Path) -> None:
    out = tmp_path / "profile"
    subprocess.run(
        ["valgrind", "--tool=callgrind", "--quiet", f"--callgrind-out-file={out}", "ls"],
        check=True,
        cwd=tmp_path,
    )
    counts = read_profile(out.read_text(errors="replace"))
    assert {place.library.split(".")[0] for place in counts} >= {"ls", "libc"}


def test_the_table_has_what_the_harness_executes_beyond_bare_deepspeed() -> None:
    million = STEPS * 10**6
    bare = Counter({Place("libtorch.so", True): 800 * million, Place("libc.so.6", True): million})
    harness = bare + Counter(
        {Place("libpython.so", True): 3 * million, Place("libpython.so", False): 5 * million}
    )
    harness[Place("libc.so.6", True)] = million // 2
    cell = {"stage": 3, "ranks": 2, "layers": 10}
    assert list(rows([cell], [{"bare": bare, "harness": harness}])) == [
        "| million instructions a step | ZeRO 3, 2 ranks |",
        "|---|---:|",
        "| the harness | 808.5 |",
        "| bare DeepSpeed | 801.0 |",
        "| the harness / bare DeepSpeed | **1.0094** |",
        "| more in the harness | +7.5 |",
        "| of it, training | +2.5 |",
        "| of it, other threads | +5.0 |",
        "| of it, `libpython.so` | +8.00 |",
        "| of it, `libc.so.6` | -0.50 |",
        "| of it, `libtorch.so` | +0.00 |",
    ]
