"""The simulator finds constructed races and accepts their fixes; real runs have none."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harness.launch.fork_server import Zygote
from tests.gates.check_streams import markdown
from tests.gates.defects import UNSYNCHRONIZED
from tests.gates.streams.cells import BETWEEN_STEPS, CONTROLS, Cell, all_cells, covering_cells
from tests.gates.streams.device import Event, Stream
from tests.gates.streams.run import Row, Seen, Wait, prepare, row_of
from tests.gates.streams.simulated import Device, simulated
from tests.real_runs import REPOSITORY
from tests.tables import beside


@pytest.fixture
def device() -> Iterator[Device]:
    with simulated() as device:
        yield device


def races(device: Device) -> int:
    return device.memory.races.total()


def test_a_read_on_another_stream_races_until_it_waits(device: Device) -> None:
    side, value = Stream(device.timeline), torch.zeros(4)
    with device.timeline.on(side):
        value[2:] + 1
        assert races(device) == 1
        side.wait_stream(device.timeline.default)
        value[2:] + 1
    assert races(device) == 1
    value[:2] += 1  # other bytes
    assert races(device) == 1
    value += 1  # possibly before the last read has ended
    assert races(device) >= 2


def test_an_event_orders_what_was_launched_before_it(device: Device) -> None:
    side, value, event = Stream(device.timeline), torch.zeros(4), Event(device.timeline)
    event.record()
    value += 1
    with device.timeline.on(side):
        event.wait()
        value * 2
        assert races(device) == 1
        event.record(device.timeline.default)
        event.wait()
        value * 2
    assert races(device) == 1


def test_host_reads_pinned_memory_after_awaiting_its_copy(device: Device) -> None:
    gradient, copy = torch.zeros(4), device.pin(torch.zeros(4))
    for waits in (lambda: None, Event(device.timeline).synchronize):
        waits()  # for an event recorded before the copy
        copy.copy_(gradient, non_blocking=True)
        copy * 2
    assert races(device) == 2
    copy.copy_(gradient, non_blocking=True)
    device.timeline.default.record_event().synchronize()
    copy * 2
    copy.copy_(gradient)
    copy * 2
    assert races(device) == 2


@pytest.mark.parametrize("mends", ["nothing", "record_stream", "wait_stream", "synchronize"])
def test_a_block_is_reused_once_other_streams_are_done_with_it(device: Device, mends: str) -> None:
    timeline = device.timeline
    side, value = Stream(timeline), torch.zeros(4)
    side.wait_stream(timeline.default)
    with timeline.on(side):
        value + 1
    if mends == "record_stream":
        value.record_stream(side)  # type: ignore[arg-type]
    elif mends == "wait_stream":
        timeline.default.wait_stream(side)
    elif mends == "synchronize":
        timeline.synchronize()
    del value
    torch.zeros(4)
    assert device.memory.reuses.total() == (mends == "nothing")
    assert races(device) == 0


def test_waits_are_counted_by_phase_line_and_kind(device: Device) -> None:
    value, number = torch.zeros(4), torch.tensor(3.0)
    trained = torch.nn.Parameter(torch.zeros(1))
    trained.grad = torch.ones(1)
    with device.timeline.during("step"):
        torch.optim.Adam([trained], foreach=False).step()  # reads its step counter
        number.item()  # the host's own
        value + number
        value[0].item()
        value.cpu()
        number.to(torch.device("cpu"))  # the device's name
        device.pin(number).to(torch.device("cpu"), non_blocking=True)
        bool((value == 0).all())
    kinds = sorted(kind for phase, _, kind in device.timeline.waits if phase == "step")
    assert kinds == ["copy to the device", "copy to the host", "value", "value"]
    assert all(place.startswith("tests/gates/") for _, place, _ in device.timeline.waits)


def made(*waits: Wait, **races: int) -> Row:
    return Row(all_cells()[0], [Seen(races, {}, [*waits], 2, "Optimizer", {}, {})])


def test_a_step_moves_at_most_one_and_a_half_times_what_it_must() -> None:
    for moved, problems in ((45.0, 0), (45.1, 1)):
        counts = {"micro-batches": 60.0, "step": moved - 1, "log": 1.0, "save": 9.0}
        seen = Seen({}, {}, [], 1, "Optimizer", {}, counts)
        assert len(Row(BETWEEN_STEPS[0], [seen]).problems) == problems


def test_what_has_to_hold() -> None:
    tables = beside(__file__, "host_waits.toml")
    allowed, refused = ([Wait(*row) for row in tables[name]] for name in ("allowed", "refused"))
    assert made(*allowed).problems == []
    for wait in refused:
        assert len(made(wait).problems) == 1, wait
    assert made(**{"a.py:1 -> b.py:2": 3}).problems == ["race: a.py:1 -> b.py:2"]
    page = markdown([made(*allowed), Row(all_cells()[1], skipped="no libaio")])
    assert "| 6.5 | 1 | 1 | 0 |" in page
    assert "`deepspeed/runtime/engine.py:1`" in page


def test_committed_page_names_every_run_and_what_decides() -> None:
    committed = (REPOSITORY / "docs" / "host_waits.md").read_text()
    assert re.findall(r"^\| ([\w-]+) \|.*\|.*\|.*\|.*\|.*\|$", committed, re.M)[1:] == [
        cell.name for cell in all_cells()
    ]
    head, _, rest = markdown([]).partition("With ")
    assert committed.startswith(head)
    assert committed.endswith(rest[rest.index("## The harness's own") :])


def test_names_of_cells_are_their_own() -> None:
    names = [cell.name for cell in all_cells()]
    assert len({*names}) == len(names)
    assert {cell.name for cell in CONTROLS} <= {*names}
    assert [cell for cell in covering_cells() if cell.is_plain]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as zygote:
        yield zygote


@pytest.mark.gate("streams")
@pytest.mark.parametrize("cell", covering_cells(), ids=lambda cell: cell.name)
def test_a_run_has_no_race_and_never_waits(cell: Cell, folder: Path, zygote: Zygote) -> None:
    assert row_of(zygote, cell, folder).problems == []


@pytest.mark.gate("streams")
def test_races_show_where_nobody_waits_for_the_device(folder: Path, zygote: Zygote) -> None:
    assert row_of(zygote, CONTROLS[0], folder, UNSYNCHRONIZED).races
