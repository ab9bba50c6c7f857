"""tools/plot_schedule.py: its output and plots, for any config."""

import functools
import time
from pathlib import Path

import pytest

from tests.run_tools import run_tool

ROOT = Path(__file__).parents[1]
RAMP = ("ramp.batch_from=12", "ramp.batch_tokens=30720", "ramp.length_from=32")


run = functools.partial(run_tool, "plot_schedule")


def test_a_panel_has_a_title(tmp_path: Path) -> None:
    run("--plot", tmp_path / "s.svg", "train.steps=9")
    assert ">learning rate</text>" in (tmp_path / "s.svg").read_text()


@pytest.mark.gate("tools")
@pytest.mark.parametrize(("name", "begins"), [("s.svg", b"<?xml"), ("s.png", b"\x89PNG")])
def test_schedule_plot_is_drawn(name: str, begins: bytes, tmp_path: Path) -> None:
    picture = tmp_path / name
    words = ("train.steps=5000", *RAMP, "ramp.length_tokens=20000")
    run("--plot", picture, *words)
    data = picture.read_bytes()
    assert data.startswith(begins)
    if name.endswith("svg"):
        assert b"tokens per sequence" in data
        run("--plot", picture, *words)
        assert picture.read_bytes() == data


@pytest.mark.gate("tools")
def test_a_run_of_any_length_takes_seconds(tmp_path: Path) -> None:
    began = time.monotonic()
    picture = tmp_path / "s.svg"
    ramp = ("ramp.batch_from=12", f"ramp.batch_tokens={128 * 12 * 10**9}")
    text = run("--plot", str(picture), "train.steps=9007199254740992", *ramp).stdout
    assert time.monotonic() - began < 60
    assert picture.stat().st_size
    lines = [line.split() for line in text.splitlines()[2:]]
    middle, last = (int(line[0].replace(",", "")) for line in lines[-2:])
    assert last == 2**53
    assert middle == pytest.approx(2**52, rel=1e-4)
    assert [line[3] for line in lines[-2:]] == ["6,144", "6,144"]
    rates = [line.split()[2] for line in run("train.steps=1000000").stdout.splitlines()[2:]]
    assert rates == ["0.00015", "0.003", "0.00165", "0.0003"]


def test_a_run_in_epochs_needs_its_steps() -> None:
    assert "10" in run("train.epochs=2", "--steps", "10").stdout
