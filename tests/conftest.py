from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from harness.data.build import Data


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


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(*values: object, name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(value) + "\n" for value in values))
        return path

    return write
