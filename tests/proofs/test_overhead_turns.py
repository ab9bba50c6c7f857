"""Real processes that wait for their turns, and those that end instead."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tools.proofs.overhead.scatter import density, share_of_blocks
from tools.proofs.overhead.turns import UNTIMED_STEPS, Length, order_of, take_turns, waiting_start
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
    assert _LENGTH.all_steps == 1 + 3 * (UNTIMED_STEPS + 2) + 2


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


@pytest.mark.gate("tools")
def test_a_rank_that_ends_in_a_turn_is_an_error_and_no_wait(tmp_path: Path) -> None:
    out = tmp_path / "two"
    with (
        pytest.raises(SystemExit, match="rank 1 had enough"),
        waiting_start(_command(out, lives=1), 2, out, out / "turns", ON_CPU) as start,
    ):
        take_turns([start], _LENGTH)
    assert all(process.poll() is not None for process in start.group.processes)


def test_a_rank_that_is_killed_while_it_waits_is_an_error(tmp_path: Path) -> None:
    out = tmp_path / "one"
    with waiting_start(_command(out), 1, out, out / "turns", ON_CPU) as start:
        (process,) = start.group.processes
        process.kill()
        process.wait()
        with pytest.raises(SystemExit, match=r"the process group ended with \[-9\]"):
            start.train(1)


@pytest.mark.parametrize("option", ["--warm-up", "--turns", "--steps"])
def test_no_length_is_less_than_one(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    Length.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args([option, "0"])
    assert f"{option}: at least 1, not 0" in capsys.readouterr().err


def test_a_density_is_the_share_of_the_blocks_that_pages_fill() -> None:
    whole_and_half = np.r_[0:512, 1024:1280].astype(np.uint64)
    assert share_of_blocks(whole_and_half) == 0.75
    assert math.isnan(share_of_blocks(np.zeros(3, np.uint64)))  # no right to see where


def test_a_density_is_read_of_a_process_or_not_known() -> None:
    filled = bytearray(b"1") * 2**26
    share = density(os.getpid())
    assert math.isnan(share) or 0 < share <= 1
    assert math.isnan(density(0))  # no such process
    assert len(filled) == 2**26


@pytest.mark.parametrize("rounds", [6, 20])
def test_no_side_is_started_first_more_often_than_others(rounds: int) -> None:
    orders = [tuple(order_of("abc", number)) for number in range(rounds)]
    assert len(set(orders)) == 6
    for place in range(3):
        counts = Counter(order[place] for order in orders).values()
        assert max(counts) - min(counts) <= 1
