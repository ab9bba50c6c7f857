"""Real processes that wait for their turns, and those that end instead."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tools.proofs.overhead.scatter import density
from tools.proofs.overhead.turns import RUSH_STEPS, Length, take_turns, waiting_start
from tools.proofs.ranks import ON_CPU

_SIDE = """
import json, os, sys
from multiprocessing.connection import Client
out, rank, lives = sys.argv[1], int(os.environ["RANK"]), int(sys.argv[2])
line = Client(out + "/turns")
line.send((rank, []))
done = 0
while (turn := line.recv()) is not None:
    if done == lives and rank == 1:
        open(out + "/1.error", "w").write("rank 1 had enough")
        sys.exit(7)
    done += 1
    with open(out + "/../order", "a") as order:
        order.write(os.path.basename(out) + " ")
    line.send((rank, [{"step_s": float(done)}] * turn["steps"]))
json.dump({"marks": {}}, open(f"{out}/rank-{rank}.json", "w"))
"""
_LENGTH = Length(warm_up=1, turns=3, steps=2)


def _command(out: Path, lives: int = 99) -> list[str]:
    out.mkdir()
    return [sys.executable, "-c", _SIDE, str(out), str(lives)]


def test_starts_train_in_turns_and_another_is_first_each_time(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    with (
        waiting_start(_command(a), 1, a, a / "turns", ON_CPU) as first,
        waiting_start(_command(b), 1, b, b / "turns", ON_CPU) as second,
    ):
        take_turns([first, second], _LENGTH)
        (rank,) = first.finish()
        second.finish()
    assert (tmp_path / "order").read_text().split() == ["a", "b", "b", "a", "a", "b"]
    assert rank["step_s"] == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]  # without the first of each turn
    assert _LENGTH.all_steps == 1 + 3 * (RUSH_STEPS + 2) + 2


def test_ranks_are_told_apart_whoever_comes_first(tmp_path: Path) -> None:
    out = tmp_path / "two"
    with waiting_start(_command(out), 2, out, out / "turns", ON_CPU) as start:
        start.take_turn(4)
        assert [len(rank["step_s"]) for rank in start.finish()] == [4, 4]


def test_a_rank_that_ends_before_it_has_warmed_up_is_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    with (
        pytest.raises(SystemExit, match=r"the process group ended with \[3\]"),
        waiting_start(command, 1, tmp_path, tmp_path / "turns", ON_CPU),
    ):
        raise AssertionError("it never waited")


def test_a_rank_that_ends_in_a_turn_is_an_error_and_no_wait(tmp_path: Path) -> None:
    out = tmp_path / "two"
    with (
        pytest.raises(SystemExit, match="rank 1 had enough"),
        waiting_start(_command(out, lives=1), 2, out, out / "turns", ON_CPU) as start,
    ):
        take_turns([start], _LENGTH)
    assert all(process.poll() is not None for process in start.group.processes)


def test_a_density_is_a_share_or_not_known() -> None:
    filled = bytearray(b"1") * 2**26
    found = density(os.getpid())
    assert 0 < found <= 1 or os.geteuid()
    assert density(0) != density(0)  # NaN: no such process
    assert len(filled) == 2**26
