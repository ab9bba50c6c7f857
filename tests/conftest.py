from __future__ import annotations

import json
import math
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# Set before torch is imported, here or in subprocesses: the tests' matrices are so small that more
# threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from harness.launch.fork_server import Zygote
from tests.browser import Browser
from tests.gates.records import Recorder, passed_tests
from tests.private_slurm import CannotStart, PrivateSlurm
from tests.ranks import close_all
from tests.real_runs import SHARED_MEMORY, imported, write_corpus

if TYPE_CHECKING:
    from harness.data.data import Data


# The longest tests start first, so that no worker ends up alone with one.
LONG_TEST_S = 10.0  # longer tests must state the reason
LONG = (
    *("test_slurm_runs.py", "test_gates.py", "engine", "test_parity.py", "test_features.py"),
    *("test_loop.py", "test_rehearse.py", "studio", "test_accept_gpu.py", "test_sweep.py"),
    *("test_configs.py", "test_memory.py", "test_checkpoints.py", "test_learning.py"),
    *("test_recipes.py", "test_divided.py", "test_readme.py"),
)
# In a gate, tests of these files are distributed one by one: each is long, or waits for others.
APART = re.compile(r"tests/(gates/|inputs/|test_slurm_runs|estimate/test_unknown)")


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "run a gate of tests/gates/gates.toml, and keep in FILE which of its tests passed"
    parser.addoption("--gate", action="append", metavar="NAME[=FILE]", default=[], help=text)


def pytest_configure(config: pytest.Config) -> None:
    records = {name: record for name, record in gates_of(config).items() if record}
    if records and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(records))


def gates_of(config: pytest.Config) -> dict[str, Path | None]:
    """Return the gates that were asked for, and the file that lists the tests that passed."""
    pairs = (option.partition("=") for option in config.getoption("--gate"))
    return {name: Path(file) if file else None for name, _, file in pairs}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tests of gates, or those outside gates, and put the longest first."""
    gates = gates_of(config)
    passed = {name: passed_tests(record) for name, record in gates.items()}

    def is_chosen(item: pytest.Item) -> bool:
        mark = item.get_closest_marker("gate")
        if mark is None or not gates:
            return mark is None and not gates
        item.user_properties.append(("gate", mark.args[0]))
        return mark.args[0] in gates and item.nodeid not in passed[mark.args[0]]

    chosen = [item for item in items if is_chosen(item)]
    config.hook.pytest_deselected(items=[item for item in items if not is_chosen(item)])
    order = {room: place for place, room in enumerate(LONG)}
    items[:] = sorted(chosen, key=lambda item: order.get(room_of(str(item.path)), len(LONG)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List long tests without a stated reason."""
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid] += report.duration
                if "slow" in report.keywords or "gate" in report.keywords:
                    seconds[report.nodeid] = -math.inf
    for nodeid, duration in seconds.items():
        if duration > LONG_TEST_S:
            terminalreporter.write_line(f"{duration:.0f} s without a `slow` mark: {nodeid}")


def room_of(file: str) -> str:
    """Return the unit of a worker: a file, or a folder whose tests share a slow start."""
    path = Path(file)
    return next((r for r in ("engine", "studio") if f"tests/{r}/" in path.as_posix()), path.name)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With -n, give a worker a whole folder at a time, in the order above."""
    from xdist.scheduler import LoadScopeScheduling

    class ByRoom(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if config.getoption("--gate"):  # each is long: the other worker must not wait for it
                return nodeid if APART.search(file) else file
            return room if (room := room_of(file)) in ("engine", "studio") else file

    config.option.loadscopereorder = False
    return ByRoom(config, log)


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def built(**keys: str) -> Data:
    """Return the data that these keys of the section data ask for."""
    from harness.config.data_section import DataConfig
    from harness.data.build import build_data
    from harness.data.spec import DataSpec

    return build_data(DataSpec(DataConfig(**keys)))


@pytest.fixture(scope="session")
def library(cache_dir: Path) -> Data:
    """Return the default corpus, built once for all tests."""
    return built(cache_dir=str(cache_dir))


@pytest.fixture(scope="session")
def tokenizer_dir(library: Data, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    library.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the arguments for a small corpus, tokenized once for all runs."""
    folder = tmp_path_factory.mktemp("data")
    corpus = write_corpus(folder / "corpus")
    built(path=str(corpus), cache_dir=str(folder / "cache"))
    return [f"data.path={corpus}", f"data.cache_dir={folder / 'cache'}"]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with Browser() as running:
        yield running


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Yield a process that starts real runs within two seconds and cleans up after them."""
    process, temporary = imported()
    yield process
    close_all()  # ranks that wait for calls
    process.close()
    assert process.left == []
    with temporary as folder:
        left = [path.name for path in Path(folder).iterdir()]
    # Torch's own, and leftovers of compilers whose rank was killed.
    own = re.compile(r"torchinductor_|cc\w{6}\.")
    assert not [name for name in left if not own.match(name)]
    shared = [path.name for path in SHARED_MEMORY.iterdir()]
    assert not [name for name in shared for port in process.ports if f"_{port}_" in name]


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateSlurm]:
    try:
        private = PrivateSlurm(tmp_path_factory.mktemp("slurm"))
    except CannotStart as error:
        pytest.skip(f"no Slurm: {error}")
    yield private
    private.close()


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the paths whose files are given to os.fsync from now on, in order."""
    paths: list[Path] = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: paths.append(Path(f"/proc/self/fd/{fd}").readlink())
    )
    return paths


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a file system of 6 MB; a checkpoint of SMALL_MODEL has 1.7 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs rights that this process lacks")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(*values: object, name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(value) + "\n" for value in values))
        return path

    return write
