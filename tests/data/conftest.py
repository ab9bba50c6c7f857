import itertools
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from harness.config.data_section import DataConfig
from harness.config.run_file import load_run_config
from harness.data.build import build_data
from harness.data.data import Data
from harness.data.glance import glances
from harness.data.spec import DataSpec
from harness.data.tokenizer import train_tokenizer
from harness.errors import ConfigError
from harness.files.corpus import find_corpus
from tests.data.chat_tokenizers import tokenizer_of

Opened = Callable[..., Any]
Refused = Callable[..., list[str]]
Written = Callable[..., Path]
WORDS = "the model reads a long question and answers it in a word or two\n"


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with a tokenizer for a few words, which opens in 2 ms."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "text.txt").write_text(WORDS * 20)
    train_tokenizer([find_corpus(str(folder / "text.txt"))], folder / "small", 300)
    return str(folder / "small")


@pytest.fixture(scope="session")
def chatml_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with a tokenizer for conversations."""
    folder = tmp_path_factory.mktemp("chatml")
    tokenizer_of("chatml").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a new folder for each example."""
    return (tmp_path_factory.mktemp("example") for _ in itertools.count())


@pytest.fixture
def opened(tmp_path: Path, tokenizer_dir: str) -> Opened:
    """Return a function that opens the data of a path. Options are keys of data or of DataSpec."""
    own = {field.name for field in fields(DataSpec)}

    def build(path: Path | None, **options: Any) -> Any:
        section = {"seq_len": 16, "held_out": 0.2, "tokenizer": tokenizer_dir}
        section |= {"cache_dir": str(tmp_path / "cache"), "path": path and str(path), **options}
        spec = {key: section.pop(key) for key in own & section.keys()}
        return built(DataSpec(DataConfig(**section), **spec))

    return build


def problems_of(read: Callable[[DataSpec], object], spec: DataSpec) -> list[str]:
    """Return the problems for which the data is rejected; empty if there are none."""
    try:
        read(spec)
    except ConfigError as error:
        return error.problems
    return []


def built(spec: DataSpec) -> Data:
    """Return build_data(spec). A dry run must agree: reject it in the same words, or accept it."""
    of_run, of_dry_run = problems_of(build_data, spec), problems_of(glances, spec)
    # A dry run does not use the cache, which may be damaged.
    assert of_run == of_dry_run or of_run[0].startswith("data.cache_dir: ")
    return build_data(spec)


@pytest.fixture
def spec_of_run(tmp_path: Path, tokenizer_dir: str) -> Callable[..., DataSpec]:
    """Return a function that returns the spec of a run config, given as key=value."""

    def spec(*words: str) -> DataSpec:
        common = ["data.seq_len=16", f"data.tokenizer={tokenizer_dir}"]
        common.append(f"data.cache_dir={tmp_path / 'cache'}")
        if not any("data.eval_path" in word for word in words):
            common.append("data.held_out=0.2")
        return DataSpec.of_run(load_run_config(None, [*common, *words]), {})

    return spec


@pytest.fixture
def opened_run(spec_of_run: Callable[..., DataSpec]) -> Opened:
    """Return a function that opens the data of a run config, given as key=value."""
    return lambda *words: built(spec_of_run(*words))


@pytest.fixture
def refused(opened: Opened, tmp_path: Path) -> Refused:
    """Return a function that returns the problems with data that cannot be opened."""

    def problems(path: Path | None, **options: Any) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            opened(path, **options)
        assert not [*tmp_path.glob("cache/*.partial-*")]
        return caught.value.problems

    return problems
