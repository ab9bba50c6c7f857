from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.two_ranks import SHARED_MEMORY, write_corpus
from tests.zygote import Zygote

if TYPE_CHECKING:
    from harness.data.build import Data


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under `-n 2 --dist loadgroup` a file's tests stay together, and all that share one launched
    process group.
    """
    for item in items:
        room = item.path.parent.name
        group = room if room == "engine" else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.path.parent.name != "engine")  # what takes longest, first


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def library(cache_dir: Path) -> Data:
    """The default corpus, built once for all tests."""
    from harness.data.build import DataSpec, build_data  # torch, which most tests do without

    return build_data(DataSpec(cache_dir=str(cache_dir)))


@pytest.fixture(scope="session")
def tokenizer_dir(library: Data, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    library.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments that name a small corpus, tokenised once for all runs."""
    from harness.data.build import DataSpec, build_data

    folder = tmp_path_factory.mktemp("data")
    corpus = write_corpus(folder / "corpus")
    build_data(DataSpec(path=str(corpus), cache_dir=str(folder / "cache")))
    return [f"data.path={corpus}", f"data.cache_dir={folder / 'cache'}"]


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Starts real runs within two seconds. Whatever happens to them, they leave nothing behind."""
    with tempfile.TemporaryDirectory() as temporary:
        process = Zygote(TMPDIR=temporary)
        yield process
        process.close()
        left = [path.name for path in Path(temporary).iterdir()]
        assert not [name for name in left if not name.startswith("torchinductor_")]  # torch's own
        shared = [path.name for path in SHARED_MEMORY.iterdir()]
        assert not [name for name in shared for port in process.ports if f"_{port}_" in name]


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(*values: object, name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(value) + "\n" for value in values))
        return path

    return write
