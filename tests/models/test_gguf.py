"""Exports that llama.cpp's converter reads: there, ids of texts and logits are transformers'."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.checkpoint.hub_layout import rewrite_tokenizer_config
from harness.data.tokenizer import load_tokenizer, vocab_size
from harness.data.tokenizer_files import save_tokenizer
from harness.files.corpus import find_corpus
from tests.gates.releases import REPOSITORY, folder
from tests.layout.test_families import TABLES
from tests.models.test_older_readers import MORE, OLDER, small, write_random
from tests.real_runs import environment
from tests.tables import beside
from tools.tokenizing.training import train

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"  # its source contains llama.cpp and the converter
BUILD = "-DGGML_NATIVE=OFF -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF"
_TABLES = beside(__file__, "gguf.toml")
CONFIGS, REASONS, ODD = _TABLES["configs"], _TABLES["reasons"], _TABLES["texts"]["odd"]
FAMILIES = {name: {"model_type": name} for name in TABLES} | MORE
TOKENS, TEXTS = 40, 100  # compared: logits of a text, ids of texts
CLOSE = 1e-3  # relative to the largest logit: llama.cpp looks up gelu in a table of halves
KINDS = {"bpe": "default", "byte_bpe": "byte-level"}
NO_SPACE = {"tokenizer.ggml.add_space_prefix": False}


def compiled(home: Path) -> Path:
    """Return the interpreter of an environment with llama.cpp and the transformers that its
    converter asks for; its source is beside it. Compiling takes ten minutes of a core.
    """
    python = home / "bin" / "python"
    if (home / "done").exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", home], check=True)
    pip = [sys.executable, "-m", "pip", "--quiet"]
    source = ["download", "--no-deps", "--no-binary", PACKAGE, "--dest", home]
    subprocess.run([*pip, *source, f"{PACKAGE}=={VERSION}"], check=True)
    shutil.unpack_archive(next(home.glob("*.tar.gz")), home, filter="data")
    next(home.glob(f"*{VERSION}/")).rename(home / "source")
    packages = [home / "source", f"transformers=={OLDER}"]
    environ = {"CMAKE_ARGS": BUILD, **os.environ}
    subprocess.run([*pip, "--python", python, "install", *packages], check=True, env=environ)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    (site / "torch_of_this_one.pth").write_text(sysconfig.get_path("purelib"))
    (home / "done").touch()
    return python


@dataclass(frozen=True)
class Export:
    """A small model of a family with large weights, and a tokenizer, as a run exports them."""

    path: Path
    tokenizer: Any
    """The one that was trained with."""

    @classmethod
    def written(cls, path: Path, config: dict[str, Any], source: Path) -> Export:
        """Write to a folder whose name says the kind of tokenizer."""
        path.mkdir(parents=True)
        tokenizer = load_tokenizer(source)
        save_tokenizer(tokenizer, path)
        rewrite_tokenizer_config(path, tokenizer)
        sizes = {**config, **CONFIGS.get(config["model_type"], {})}
        values = small({**sizes, "vocab_size": vocab_size(tokenizer)})
        write_random(path, values, 0.1, path.parents[1] / f"of {path.name}")
        return cls(path, tokenizer)

    def read(self, python: Path, texts: list[str], overrides: dict[str, bool]) -> tuple[int, float]:
        """Return how many texts have the tokenizer's ids in llama.cpp, and the relative error of
        the logits. Raises AssertionError with what the converter or llama.cpp says.
        """
        refused = self.path / "refused"
        assert not refused.exists(), refused.read_text()
        expected = self.tokenizer(texts).input_ids
        ids = (max(expected, key=len) * TOKENS)[:TOKENS]
        special = not getattr(self.tokenizer, "split_special_tokens", False)
        job = {"path": str(self.path / "model.gguf"), "texts": texts, "ids": ids}
        job |= {"special": special, "overrides": overrides}
        (self.path / "job.json").write_text(json.dumps(job))
        command = [python, "-c", _TABLES["opens"], self.path / "job.json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-300:]
        found, logits = json.loads(done.stdout.splitlines()[-1])
        model = AutoModelForCausalLM.from_pretrained(self.path, attn_implementation="eager").eval()
        with torch.no_grad():
            theirs = model(input_ids=torch.tensor([ids])).logits[0]
        off = (torch.tensor(logits) - theirs).abs().max() / theirs.abs().max()
        return sum(map(list.__eq__, found, expected)), off.item()


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return a folder with tokenizers of every kind that is trained here, and texts."""
    home = tmp_path_factory.mktemp("tokenizers")
    pages = "\n".join(path.read_text() for path in sorted((REPOSITORY / "docs").glob("*.md")))
    (home / "pages.txt").write_text(pages)
    corpus = find_corpus(str(home / "pages.txt"))
    for kind in KINDS:
        train(kind, corpus, home / kind, 1024, byte_fallback=True)
    draw = random.Random(0)
    starts = [draw.randrange(len(pages)) for _ in range(TEXTS - len(ODD))]
    return home, [*ODD, *(pages[at : at + draw.randrange(400)] for at in starts)]


def reason(error: str) -> str:
    """Return in words why the converter refuses."""
    return next((words for text, words in REASONS.items() if text in error), error)


def converted(python: Path, exports: Path) -> None:
    """Convert every folder in `exports`."""
    source = python.parents[1] / "source" / "vendor" / "llama.cpp"
    command = [python, "-c", _TABLES["converts"], source, exports]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.gate("gguf")
def test_llama_cpp_agrees_with_exports(tokenizers: tuple[Path, list[str]], tmp_path: Path) -> None:
    python, (home, texts) = compiled(folder("gguf")), tokenizers
    exports = {
        (kind, name): Export.written(tmp_path / "exports" / f"{kind}-{n}", config, home / kind)
        for n, (name, config) in enumerate(FAMILIES.items())
        for kind in ("bpe", "byte_bpe")
    }
    converted(python, tmp_path / "exports")
    said, wrong = defaultdict[str, list[str]](list), {}
    for (kind, name), export in exports.items():
        try:
            same, off = export.read(python, texts, {})
            row = KINDS[kind]
            if same < TEXTS and kind == "bpe":
                same, off = export.read(python, texts, NO_SPACE)
                row += ", with `add_space_prefix` overridden"
            if same < TEXTS or off > CLOSE:
                wrong[kind, name] = same, off
        except AssertionError as error:
            row = f"{KINDS[kind]}: refused, {reason(str(error))}"
        said[row].append(name.replace("_", r"\_"))
    assert not wrong
    rows = [f"| {row} | {', '.join(names)} |" for row, names in sorted(said.items())]
    table = "\n".join(rows)
    assert table in (REPOSITORY / "docs" / "export.md").read_text(), table


@pytest.mark.gate("gguf")
def test_llama_cpp_knows_added_tokens(tokenizers: tuple[Path, list[str]], tmp_path: Path) -> None:
    """By the commands of docs/models.md."""
    python, (home, texts) = compiled(folder("gguf")), tokenizers
    page = (REPOSITORY / "docs" / "models.md").read_text()
    [commands] = re.findall(r"```python\n([^`]*AutoTokenizer[^`]*)```", page)
    commands = commands.replace("my-model", str(home / "bpe"))
    exec(commands.replace("with-tokens", str(home / "added")))
    config = {"model_type": "llama"}
    export = Export.written(tmp_path / "exports" / "added", config, home / "added")
    converted(python, tmp_path / "exports")
    texts = [*texts, "<|im_start|>user\nhello<|im_end|>\n"]
    end = export.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end in export.tokenizer(texts[-1]).input_ids
    same, off = export.read(python, texts, {})
    assert same == len(texts)
    assert off < CLOSE
