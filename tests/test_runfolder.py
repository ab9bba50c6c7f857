"""The run folder: a kill or a second writer must not be able to damage it."""

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

import psutil
import pytest

from harness.errors import CannotSave, ConfigError
from harness.files.records import Unreadable
from harness.runfolder import RunFolder, create_run_dir
from tests.real_runs import fill

ROOT = Path(__file__).parents[1]
HOLD = "import sys; from harness.runfolder import RunFolder; "
HOLD += "folder = RunFolder(sys.argv[1]); folder.open(); "


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    folder = RunFolder(tmp_path / "run")
    folder.open()
    yield folder
    folder.close()


@contextmanager
def another_writer(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a second process that has opened the folder and waits."""
    command = [sys.executable, "-c", HOLD + "print('open', flush=True); sys.stdin.read()", path]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield process
        process.kill()


def write_owner(path: Path, **changes: object) -> None:
    """Leave a lock file behind as if this had been its owner."""
    path.mkdir(exist_ok=True)
    owner = {"host": "elsewhere", "pid": 1, "job": None, "since": "2026-01-01T00:00:00+00:00"}
    (path / "lock").write_text(json.dumps({**owner, **changes}))


@pytest.mark.parametrize("kind", ["file", "pipe", "link"])
def test_heartbeats_that_are_no_folder_are_rejected(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "heartbeats"
    make = {"file": path.touch, "pipe": lambda: os.mkfifo(path)}
    make.get(kind, lambda: path.symlink_to("nowhere"))()
    with pytest.raises(ConfigError, match=f"{path} is not a folder: remove it"):
        RunFolder(tmp_path).open()
    assert list(tmp_path.iterdir()) == [path]


def test_a_living_writer_on_this_host_is_refused_by_name(tmp_path: Path) -> None:
    with another_writer(tmp_path) as process:
        with pytest.raises(ConfigError, match=rf"run\.dir = .* by process {process.pid} on"):
            RunFolder(tmp_path).open()
        assert RunFolder(tmp_path).read_status()["attempt"] == 1, "the refused one left its mark"


def test_the_lock_of_a_killed_process_is_taken_over_and_reported(tmp_path: Path) -> None:
    with another_writer(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        folder = RunFolder(tmp_path)
        folder.status_path.write_text('{"attempt": 1, "step": 8, "gpu_hours": 1.0}')
        folder.metrics_path.write_text('{"gpu_hours": 1.5}\n{"step": 9, "gpu_hours": 2.5}\n')
        stale = folder.open() or ""
    assert stale.startswith(f"process {process.pid} on ")
    assert (folder.attempt, folder.gpu_hours_before) == (2, 2.5), "its hours count"
    folder.close()


def test_a_released_lock_leaves_no_owner(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for attempt in (1, 2, 3):
        assert folder.open() is None
        assert folder.attempt == attempt
        folder.close()
        folder.close()


@pytest.mark.parametrize("started", ["its own", "none", "another"])
def test_without_flock_a_living_writer_is_rejected(started: str, tmp_path, monkeypatch) -> None:
    """Lustre has no such locks unless it is mounted with -o flock."""
    missing = OSError(errno.ENOSYS, "Function not implemented")
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=missing))
    folder, lock = RunFolder(tmp_path), tmp_path / "lock"
    with another_writer(tmp_path) as process:
        owner = json.loads(lock.read_text())
        seconds = psutil.Process(process.pid).create_time() - psutil.boot_time()
        assert owner["started"] / os.sysconf("SC_CLK_TCK") == pytest.approx(seconds, abs=2)
        if started == "none":  # written by an earlier version
            del owner["started"]
        if started == "another":  # another process had its number before
            owner["started"] -= 1
        lock.write_text(json.dumps(owner))
        if started != "another":
            with pytest.raises(ConfigError, match=rf"by process {process.pid} on"):
                folder.open()
            process.kill()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # leaves a zombie
        assert (folder.open() or "").startswith(f"process {process.pid} on")
    folder.close()
    assert folder.open() is None
    folder.append_event("written")
    folder.close()
    assert [event["kind"] for event in folder.read_events()] == ["written"]


@pytest.mark.parametrize(
    ("job", "owners"), [("18", None), ("18", "17"), (None, None), ("17", "17")]
)
def test_lock_of_another_host_is_taken_over_by_its_own_job_only(
    job: str | None, owners: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A requeued job takes over; two jobs without Slurm are not the same job."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    write_owner(tmp_path, job=owners)
    folder = RunFolder(tmp_path)
    if job == owners == "17":
        stale = "process 1 on elsewhere, Slurm job 17, since 2026-01-01T00:00:00+00:00"
        assert folder.open() == stale
        folder.close()
    else:
        with pytest.raises(ConfigError, match=r"process 1 on elsewhere.*delete .*/lock"):
            folder.open()


def test_run_records_round_trip(folder: RunFolder) -> None:
    folder.write_plan({"steps": 2})
    folder.append_metrics({"step": 1, "loss": 3.5, "mfu": None})
    folder.append_event("overflow", step=1, scale=2.0)
    reader = RunFolder(folder.path)
    assert reader.read_plan() == {"steps": 2}
    assert reader.read_metrics() == [{"attempt": 1, "step": 1, "loss": 3.5, "mfu": None}]
    (event,) = reader.read_events()
    when = datetime.fromisoformat(event.pop("time"))
    assert event == {"attempt": 1, "kind": "overflow", "step": 1, "scale": 2.0}
    assert when.tzinfo is not None
    assert abs((datetime.now(UTC) - when).total_seconds()) < 60


def test_status_follows_the_run_and_counts_attempts(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.read_status() is None
    folder.open()
    assert {"outcome": "running", "code": None, "step": 0, "attempt": 1}.items() <= (
        folder.read_status() or {}
    ).items()
    folder.count_gpu_hours(4, 0.0)
    with mock.patch("time.monotonic", return_value=900.0):
        folder.write_status("stopped", 75, 7)
    folder.close()
    folder.open()
    assert folder.gpu_hours_before == 1.0
    status = folder.read_status() or {}
    assert {"outcome": "running", "code": None, "step": 7, "attempt": 2}.items() <= status.items()
    datetime.fromisoformat(status["time"])
    folder.close()


def test_a_reader_creates_nothing(tmp_path: Path) -> None:
    reader = RunFolder(tmp_path / "nothing")
    assert reader.read_plan() is None
    assert reader.read_metrics() == []
    assert reader.read_events() == []
    assert list(tmp_path.iterdir()) == []


def test_run_folder_writes_need_the_lock(tmp_path: Path) -> None:
    writes: list[Callable[[RunFolder], None]] = [
        lambda folder: folder.write_plan({}),
        lambda folder: folder.write_status("done", 0, 1),
        lambda folder: folder.append_metrics({"step": 1}),
        lambda folder: folder.append_event("x"),
    ]
    for write in writes:
        with pytest.raises(AssertionError, match="not open for writing"):
            write(RunFolder(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_metrics_keep_the_last_line_of_each_counted_step(folder: RunFolder) -> None:
    lines = [(1, 4.0), (2, 3.0), (3, 2.0), (2, 3.1), ("x", 1.0), ([1], 1.0), (None, 1.0)]
    for step, loss in lines:
        folder.append_metrics({"step": step, "loss": loss})
    kept = [(line["step"], line["loss"]) for line in folder.read_metrics()]
    assert kept == [(1, 4.0), (2, 3.1), (3, 2.0)]


def test_non_finite_numbers_stay_visible_and_the_file_stays_json(folder: RunFolder) -> None:
    nan, inf = float("nan"), float("inf")
    folder.append_metrics({"step": 1, "loss": nan, "all": [inf, (-inf, {"x": 1.0})]})
    line = json.loads(
        folder.metrics_path.read_text(),
        parse_constant=lambda word: pytest.fail(f"{word} is not JSON"),
    )
    assert line == {"attempt": 1, "step": 1, "loss": "nan", "all": ["inf", ["-inf", {"x": 1.0}]]}


def test_half_written_line_is_skipped_and_cut_at_reopening(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.open()
    folder.append_metrics({"step": 1})
    folder.append_event("saved")
    folder.close()
    for path in (folder.metrics_path, folder.events_path):
        with path.open("a") as file:
            file.write('{"attempt": 1, "st')
    assert [line["step"] for line in folder.read_metrics()] == [1]
    assert [event["kind"] for event in folder.read_events()] == ["saved"]
    folder.open()
    folder.append_metrics({"step": 2})
    folder.close()
    assert [line["step"] for line in folder.read_metrics()] == [1, 2]
    assert len(folder.metrics_path.read_text().splitlines()) == 2
    assert len(folder.events_path.read_text().splitlines()) == 1


def test_damaged_line_has_a_warning(folder: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    damaged = [b'{"kind"', b"[1]", b"\xff\x00", b"[" * 100_000, b"{}"]
    lines = [b'{"kind": "a"}', *damaged, b'{"kind": "b"}']
    folder.events_path.write_bytes(b"".join(line + b"\n" for line in lines))
    assert [event["kind"] for event in folder.read_events()] == ["a", "b"]
    warned = [record.getMessage() for record in caplog.records]
    start = f"{folder.events_path}: line"
    assert warned == [f"{start} {number} is damaged and left out" for number in range(2, 7)]


DAMAGES = [b"", b'{"attempt": 3, "st', b"null", b"[]", b"\xff\xfe", b"[" * 100_000, b'"status"']


@pytest.mark.parametrize("damage", [*DAMAGES, b"{}", b'{"attempt": "3", "step": 2}'])
def test_a_damaged_status_is_named_and_attempts_go_on(damage: bytes, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for _ in range(2):
        folder.open()
        folder.append_event("a") if folder.attempt > 1 else folder.append_metrics({"step": 7})
        folder.close()
    folder.status_path.write_bytes(damage)
    with pytest.raises(ConfigError, match=re.escape(str(folder.status_path))):
        folder.read_status()
    folder.open()
    assert folder.attempt == 3
    assert str(folder.status_path) in folder.damaged[0]
    status = folder.read_status() or {}
    assert (status["outcome"], status["attempt"], status["step"]) == ("running", 3, 7)
    folder.close()


DAMAGED_LOCKS = [b'{"host": "else', b"\xff\xfe\x00", b"[1]", b'{"host": 3}', b"[" * 100_000]


@pytest.mark.parametrize("damage", [*DAMAGES, *DAMAGED_LOCKS])
def test_damaged_plan_is_named_and_damaged_lock_has_no_owner(damage: bytes, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "lock").write_bytes(damage)
    assert folder.open() is None
    folder.plan_path.write_bytes(damage)
    if damage in DAMAGES or damage == b"[1]":
        with pytest.raises(ConfigError, match=re.escape(str(folder.plan_path))):
            folder.read_plan()
    folder.close()


@pytest.mark.parametrize("name", ["lock", "metrics.jsonl", "events.jsonl"])
def test_a_record_that_is_no_file_is_named_and_nothing_written(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    makers: list[Callable[[Path], object]] = [Path.mkdir, os.mkfifo]
    makers += [lambda path: path.symlink_to("/dev/null"), lambda path: path.symlink_to(path.name)]
    for make in makers:
        make(run / name)
        with pytest.raises(Unreadable, match=f"{name} is (not a regular|a link, not a) file"):
            RunFolder(run).open()
        assert [path.name for path in run.iterdir()] == [name]
        if name == "events.jsonl":
            with pytest.raises(Unreadable, match=name):
                RunFolder(run).read_events()
        (run / name).rmdir() if (run / name).is_dir() else (run / name).unlink()


def test_full_record_file_is_named(folder: RunFolder) -> None:
    for path, write in (
        (folder.metrics_path, lambda: folder.append_metrics({"step": 1})),
        (folder.events_path, lambda: folder.append_event("kind")),
    ):
        path.unlink()
        path.symlink_to("/dev/full")
        with pytest.raises(CannotSave, match=re.escape(f"{path} cannot be written (No space")):
            write()
        path.unlink()
    folder.append_failure(1, message="has been suppressed where it could not be written")


def test_full_disk_status_overwrites_the_old_one(small_disk: Path) -> None:
    folder = RunFolder(small_disk / "run")
    folder.open()
    fill(small_disk)
    with pytest.raises(CannotSave, match=r"plan\.json cannot be written"):
        folder.write_plan({"steps": 2})
    folder.write_status("failed", 74, 7, "no room")
    status = folder.read_status() or {}
    assert (status["outcome"], status["step"], status["message"]) == ("failed", 7, "no room")
    assert [path.name for path in folder.path.glob(".*")] == []
    folder.close()


def test_any_rank_says_that_the_run_failed_unless_it_has_ended(folder: RunFolder) -> None:
    other = RunFolder(folder.path)
    other.attempt = folder.attempt
    other.write_failure(1, 5, "why")
    status = folder.read_status() or {}
    assert {"outcome": "failed", "code": 1, "step": 5, "message": "why"}.items() <= status.items()
    other.write_failure(78, 5, "later")
    assert folder.read_status() == status
    folder.close()
    folder.open()
    other.write_failure(1, 5, "of an attempt before")
    assert (folder.read_status() or {})["outcome"] == "running"


def test_lines_and_replaced_files_are_synced(folder: RunFolder, synced: list[Path]) -> None:
    folder.append_metrics({"step": 1})
    folder.sync()
    assert synced == [folder.metrics_path, folder.events_path, folder.path]
    folder.write_plan({})
    assert synced[-1].name.startswith(".plan.json.")


def test_a_line_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    code = HOLD + "folder.append_metrics({'step': 1}); import os; os._exit(9)"
    subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, check=False)
    assert [line["step"] for line in RunFolder(tmp_path).read_metrics()] == [1]


def test_a_status_that_cannot_be_written_leaves_the_old_one(folder: RunFolder) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        folder.write_plan({"steps": {1, 2}})
    folder.write_plan({"steps": 2})
    with pytest.raises(TypeError, match="not JSON serializable"):
        folder.write_plan({"steps": {1, 2}})
    assert folder.read_plan() == {"steps": 2}


def test_default_folders_are_told_apart_even_within_one_second(tmp_path: Path) -> None:
    time = datetime(2026, 2, 3, 4, 5, 6, tzinfo=UTC)
    paths = [create_run_dir("meta-llama/Llama 3/", "zero3", time, tmp_path) for _ in range(3)]
    assert [path.name for path in paths] == [
        "Llama_3-zero3-20260203-040506",
        "Llama_3-zero3-20260203-040506-2",
        "Llama_3-zero3-20260203-040506-3",
    ]
    assert all(path.is_dir() for path in paths)


def test_any_rank_can_say_why_it_failed(folder: RunFolder) -> None:
    folder.append_event("begun")
    RunFolder(folder.path).append_failure(3, step=7, message="no memory")
    folder.append_event("ended")
    begun, failed, ended = folder.read_events()
    assert (begun["kind"], ended["kind"]) == ("begun", "ended")
    assert (failed["kind"], failed["rank"], failed["step"]) == ("failed", 3, 7)
