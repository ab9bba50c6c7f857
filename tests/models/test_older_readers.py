"""Exports of every family of the table, opened by transformers 4 in a separate environment."""

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig

from harness.checkpoint.export import write_model
from harness.checkpoint.hub_layout import rewrite_tokenizer_config
from harness.data.tokenizer import load_tokenizer
from harness.data.tokenizer_files import save_tokenizer
from harness.models.skeleton import hf_config, skeleton
from tests.checkpoint.test_export import stored
from tests.layout.test_families import TABLES
from tests.models.small import built
from tests.models.test_as_trained import KINDS_OF, exported
from tests.real_runs import environment
from tests.tables import beside

OLDER = "4.57.*"
Config = dict[str, Any]
_TABLES = beside(__file__, "older_readers.toml", with_parts=True)
_SIZES, MORE, TOKENIZERS = (_TABLES[name] for name in ("sizes", "more", "tokenizers"))


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of an environment with transformers 4 and this one's torch."""
    folder = tmp_path_factory.mktemp("older")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    uv = shutil.which("uv", path=Path(sys.executable).parent) or shutil.which("uv")
    install = [sys.executable, "-m", "pip", "--python", python, "install"]
    if uv:
        install = [uv, "pip", "install", "--python", python]
    install.append(f"transformers=={OLDER}")
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"transformers {OLDER} cannot be installed: {done.stderr[-300:]}")
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (packages / "torch_of_this_one.pth").write_text(sysconfig.get_path("purelib"))
    return python


def opened_by(python: Path, folder: Path, text: str = "") -> dict[str, Any]:
    """Return what transformers 4 reads from the subfolders of a folder."""
    done = subprocess.run(
        [python, "-c", _TABLES["opens"], folder, text],
        capture_output=True,
        text=True,
        check=False,
        env=environment(HF_MODULES_CACHE=str(folder.with_name("modules"))),
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("version").startswith(OLDER.removesuffix("*"))
    return found


def small(config: Config) -> Config:
    """Return a tiny model of a family, with a rotary base that is not any class's default."""
    model_type = config["model_type"]
    keys = AutoConfig.for_model(model_type).to_dict()
    sizes = {key: value for key, value in _SIZES.items() if key in keys}
    made = hf_config({"model_type": model_type, **sizes, **config}).to_dict()
    rotary = made.get("rope_parameters") or {}
    for table in [v for v in rotary.values() if isinstance(v, dict)] or [rotary]:
        if "rope_theta" in table and "rope_parameters" not in config and "rotary_pct" not in config:
            table["rope_theta"] = 3 * table["rope_theta"] + 7
    named = {"rope_parameters": rotary} if rotary else {}
    return {"model_type": model_type, **sizes, **config, **named}


def write_random(folder: Path, values: dict[str, Any], deviation: float, states: Path) -> Any:
    """Export a model with random matrices of that deviation; return it."""
    torch.manual_seed(0)
    model = built(values, attention="eager")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, deviation)
    empty = skeleton(hf_config(values), torch.float32, "eager")
    write_model(folder, empty, stored(model, states), source=values)
    return model


@pytest.mark.gate("models")
def test_transformers_4_computes_the_same_with_every_export(older: Path, tmp_path: Path) -> None:
    exports = tmp_path / "exports"
    for name, config in {**{name: {"model_type": name} for name in TABLES}, **MORE}.items():
        (folder := exports / name.replace(" ", "_")).mkdir(parents=True)
        model = write_random(folder, small(config), 0.3, tmp_path / f"of {name}")
        with torch.no_grad():
            logits = model.eval()(input_ids=torch.arange(3, 43)[None]).logits
        torch.save(logits, folder / "logits.pt")
    found = opened_by(older, exports)
    assert len(found) == len(TABLES) + len({*MORE} - {*TABLES})
    wrong = {
        n: errors
        for n, errors in found.items()
        if errors[0] == errors or errors[0] > 1e-4 or any(errors[1:])
    }
    assert not wrong


@pytest.mark.gate("models")
def test_transformers_4_runs_the_code_that_an_export_brings(older: Path, tmp_path: Path) -> None:
    exports = tmp_path / "exports"
    for kind, attention in KINDS_OF.items():
        model = exported(exports / kind, attention, reversible=kind == "performer")
        with torch.no_grad():
            logits = model(input_ids=torch.arange(3, 43)[None]).logits
        torch.save(logits, exports / kind / "logits.pt")
    found = opened_by(older, exports)
    assert found.keys() == KINDS_OF.keys()
    assert all(errors[0] < 1e-5 and not any(errors[1:]) for errors in found.values()), found


def write_source(folder: Path, config: Config) -> None:
    """Write a tokenizer of words, as version 4 does."""
    words = ["<unk>", "<s>", "<|endoftext|>", *_TABLES["parts"]["marks"], "hello", "world"]
    backend = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken(word, special=True) for word in words[:5]])
    if config.get("bos_token"):
        special = [("<s>", 1)]
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=special)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    values = {"eos_token": "<|endoftext|>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


@pytest.mark.gate("models")
def test_transformers_4_opens_the_tokenizers_of_exports(older: Path, tmp_path: Path) -> None:
    exports, text, expected = tmp_path / "exports", "hello <|im_end|> world", {}
    exports.mkdir()
    for name, config in TOKENIZERS.items():
        write_source(tmp_path / name, config)
        save_tokenizer(load_tokenizer(tmp_path / name), exports / name)
        tokenizer = load_tokenizer(exports / name)
        rewrite_tokenizer_config(exports / name, tokenizer)
        expected[name] = tokenizer(text).input_ids
    assert opened_by(older, exports, text) == expected
