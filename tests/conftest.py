from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.two_ranks import SHARED_MEMORY, forking, write_corpus
from tools.proofs.zygote import Zygote

if TYPE_CHECKING:
    from harness.data.data import Data


# What takes longest begins first, so that no worker is left with it alone. Slurm's jobs and hangs
# wait more than they compute: beside them, two others have the cores.
LONG = (
    *("test_parity.py", "test_slurm.py", "test_accept_gpu.py", "engine", "test_parity_defects.py"),
    *("test_checkpoints.py", "test_hangs.py", "test_learning.py", "test_rehearse.py"),
    *("test_loop.py", "test_preflight_ranks.py", "test_memory.py", "test_benchmark_overhead.py"),
    *("test_saves.py", "test_find_lr.py", "test_soak.py", "test_steps.py", "test_storage.py"),
    *("test_pipeline_runs.py", "test_import_checkpoint.py", "test_benchmark_gpu.py"),
    *("test_kernels.py", "test_sweep.py"),
)


def room_of(file: str) -> str:
    """A file, but for tests/engine, all of whose files share one launched process group."""
    path = Path(file)
    return "engine" if "tests/engine/" in path.as_posix() else path.name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gate"):
            item.add_marker("slow")  # else `-m 'not slow'`, which replaces 'not gate', takes it
    order = {room: place for place, room in enumerate(LONG)}
    items.sort(key=lambda item: order.get(room_of(str(item.path)), len(LONG)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Under -n a worker takes a whole room at a time, in the order above."""
    from xdist.scheduler import LoadScopeScheduling

    class ByRoom(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "engine" if room_of(file) == "engine" else file

    config.option.loadscopereorder = False
    return ByRoom(config, log)


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def library(cache_dir: Path) -> Data:
    """The default corpus, built once for all tests."""
    from harness.config.data_section import DataConfig
    from harness.data.build import build_data
    from harness.data.spec import DataSpec

    return build_data(DataSpec(DataConfig(cache_dir=str(cache_dir))))


@pytest.fixture(scope="session")
def tokenizer_dir(library: Data, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    library.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments that name a small corpus, tokenised once for all runs."""
    from harness.config.data_section import DataConfig
    from harness.data.build import build_data
    from harness.data.spec import DataSpec

    folder = tmp_path_factory.mktemp("data")
    corpus = write_corpus(folder / "corpus")
    build_data(DataSpec(DataConfig(path=str(corpus), cache_dir=str(folder / "cache"))))
    return [f"data.path={corpus}", f"data.cache_dir={folder / 'cache'}"]


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Starts real runs within two seconds. Whatever happens to them, they leave nothing behind."""
    with tempfile.TemporaryDirectory() as temporary:
        process = forking(TMPDIR=temporary)
        yield process
        process.close()
        assert process.left == []
        left = [path.name for path in Path(temporary).iterdir()]
        # Torch's own, and what a compiler leaves whose rank was killed while it waited for it.
        own = re.compile(r"torchinductor_|cc\w{6}\.")
        assert not [name for name in left if not own.match(name)]
        shared = [path.name for path in SHARED_MEMORY.iterdir()]
        assert not [name for name in shared for port in process.ports if f"_{port}_" in name]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MB: a checkpoint of SMALL_MODEL has 1.7."""
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
