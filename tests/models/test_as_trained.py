"""Exports that include their code: opened with it, by the harness's own, and without it."""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from harness.layout.code_exports import as_plain
from harness.models.as_trained import attend_as_trained
from harness.models.attention import attend_with
from harness.models.efficient_attention.kinds import KINDS
from harness.models.export_code import class_as_trained, opened_as_trained, write_code
from tests.engine.small import MODEL
from tests.models.small import built
from tests.models.test_efficient_attention import SMALL
from tests.tables import beside

LONG = {**MODEL, "max_position_embeddings": 256}
IDS = torch.randint(1, 64, (2, 70), generator=torch.Generator().manual_seed(0))
KINDS_OF: dict[str, dict[str, Any]] = {
    kind: {"kind": kind, "sizes": SMALL[kind], "seed": 3} for kind in KINDS
}


def model_of(**config: Any) -> Any:
    return built({**LONG, **config}).eval()


def exported(folder: Path, attention: dict[str, Any], **config: Any) -> Any:
    """Write an export; return its model as trained."""
    model = model_of(**config)
    model.save_pretrained(folder)
    write_code(folder, model, attention)
    model.config.trained_attention = attention
    model.config._attn_implementation = None  # not chosen
    own = class_as_trained(type(model))(model.config)
    own.load_state_dict(model.state_dict())
    return own.eval()


def logits(model: Any, **arguments: Any) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model.eval()(input_ids=IDS, use_cache=False, **arguments).logits
    return output


def run_python(code: str, folder: Path) -> str:
    """Return the output of a process that only knows transformers."""
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_copied_code_imports_nothing_of_the_harness(tmp_path: Path) -> None:
    exported(tmp_path, KINDS_OF["performer"], reversible=True)
    files = {path.stem: path.read_text() for path in tmp_path.glob("*.py")}
    assert {"modeling_as_trained", "as_trained", "reversible", "units"} < files.keys()
    for text in files.values():
        assert not re.findall(r"^\s*(?:from|import) harness", text, re.MULTILINE)
        assert {*re.findall(r"^from \.(\w+) import", text, re.MULTILINE)} <= files.keys()
    # transformers 4 copies the files that the first one imports.
    named = re.findall(r"^from \.(\w+) import", files.pop("modeling_as_trained"), re.MULTILINE)
    assert {*named} == files.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_continued_as_if_it_were_read_anew(kind: str) -> None:
    model = model_of()
    attend_as_trained(model, KINDS_OF[kind])
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    cached, anew = (model.generate(IDS, use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached, anew)
    cache, whole = DynamicCache(config=model.config), logits(model)
    with torch.no_grad():
        parts = [
            model(input_ids=IDS[:, a:b], past_key_values=cache) for a, b in ((0, 40), (40, 70))
        ]
    torch.testing.assert_close(torch.cat([part.logits for part in parts], 1), whole)


def test_positions_divide_rows_into_documents() -> None:
    model = model_of()
    attend_as_trained(model, KINDS_OF["longformer"])
    positions = torch.cat([torch.arange(30), torch.arange(40)])[None]  # of both rows
    together = logits(copy.deepcopy(model), position_ids=positions)
    with torch.no_grad():
        alone = [model(input_ids=part).logits for part in IDS.split([30, 40], 1)]
    torch.testing.assert_close(together, torch.cat(alone, 1))


def test_what_a_kind_cannot_read_is_refused() -> None:
    model = model_of()
    attend_as_trained(model, KINDS_OF["performer"])
    mask = torch.ones_like(IDS)
    assert torch.equal(logits(model, attention_mask=mask), logits(model))
    mask[0, :5] = 0
    with pytest.raises(ValueError, match="also reads padding"):
        logits(model, attention_mask=mask)
    with pytest.raises(ValueError, match="dynamic cache"):
        model.generate(IDS, max_new_tokens=2, cache_implementation="static")
    attend_with("sdpa", model)
    assert logits(model, attention_mask=mask).isfinite().all()


@pytest.mark.parametrize(
    ("attention", "config"),
    [
        (KINDS_OF["linformer"], {}),
        ({}, {"reversible": True}),
        (KINDS_OF["linformer"], {"reversible": True}),
    ],
)
def test_the_harness_opens_it_as_it_was_trained(
    attention: dict[str, Any], config: dict[str, Any], tmp_path: Path
) -> None:
    model_of().save_pretrained(tmp_path)
    assert opened_as_trained(tmp_path) is None
    model = exported(tmp_path, attention, **config)
    opened = opened_as_trained(tmp_path)
    assert torch.equal(logits(opened), logits(model))
    assert not torch.equal(logits(opened), logits(model_of()))
    values = json.loads((tmp_path / "config.json").read_text())
    assert as_plain(values)["model_type"] == "llama"
    assert "auto_map" not in as_plain(values)


def test_attention_without_custom_code_is_exact_or_rejected(tmp_path: Path) -> None:
    for name, config in (("attention", {}), ("streams", {"reversible": True})):
        exported(tmp_path / name, KINDS_OF["performer"], **config)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "attention")
    assert torch.equal(logits(plain), logits(model_of()))
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "streams", trust_remote_code=False)
    chosen = model_of(trained_attention=KINDS_OF["performer"])
    assert class_as_trained(type(chosen))(chosen.config).config._attn_implementation == "sdpa"


@pytest.mark.gate("models")
def test_others_open_it_with_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    expected = []
    for name, config in (("attention", {}), ("streams", {"reversible": True})):
        model = exported(tmp_path / name, KINDS_OF["reformer"], **config)
        total = float(logits(model).double().sum())
        options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
        expected += [str(total)] * 2 + [str(model.generate(IDS, **options)[0, -4:].tolist())]
    code = beside(__file__, "as_trained.toml")["opens"].format(ids=IDS.tolist())
    shown = run_python(code, tmp_path).splitlines()
    assert [line for line in shown if "accelerator" not in line] == expected  # from another library
