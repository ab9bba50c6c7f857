"""LSTM and GRU decoders: torch's own cells, causal; test_carried.py has their states."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.models.initialize import materialize
from harness.models.recompute import checkpoint_layers
from harness.models.skeleton import hf_config, skeleton

ROWS, TOKENS, LAYERS, SIZE, STATES = 3, 20, 2, 16, 24
SIZES = {
    "model_type": "recurrent",
    "vocab_size": 64,
    "hidden_size": SIZE,
    "recurrent_size": STATES,
    "num_hidden_layers": LAYERS,
}
CELLS = {"lstm": nn.LSTM, "gru": nn.GRU}


def model_of(cell: str) -> Any:
    model = skeleton(hf_config({**SIZES, "cell": cell}), torch.float32)
    materialize(model, 0, torch.device("cpu"))
    return model


def text() -> torch.Tensor:
    return torch.randint(64, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("cell", CELLS)
def test_a_cell_computes_what_torchs_module_does(cell: str) -> None:
    ours = model_of(cell).model.layers[0].cell
    theirs = CELLS[cell](SIZE, STATES, batch_first=True)
    theirs.load_state_dict({f"{name}_l0": value for name, value in ours.state_dict().items()})
    inputs = torch.randn(ROWS, TOKENS, SIZE)
    torch.testing.assert_close(ours(inputs)[0], theirs(inputs)[0])


@pytest.mark.parametrize("cell", CELLS)
def test_no_position_reads_the_future(cell: str) -> None:
    model, ids = model_of(cell), text()
    changed = ids.clone()
    changed[:, 12] = (ids[:, 12] + 1) % 64
    logits, after = model(input_ids=ids).logits, model(input_ids=changed).logits
    assert torch.equal(logits[:, :12], after[:, :12])
    assert (logits[:, 12:] != after[:, 12:]).any(-1).all()


@pytest.mark.parametrize("cell", CELLS)
def test_layers_that_are_computed_again_have_the_same_gradients(cell: str) -> None:
    gradients = []
    for again in (False, True):
        model = model_of(cell).train()
        if again:
            checkpoint_layers(model, "full")
        model(input_ids=text()).logits.logsumexp(-1).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


@pytest.mark.gate("models")
def test_others_open_what_is_saved_with_its_code(tmp_path: Path) -> None:
    model = model_of("lstm")
    model.save_pretrained(tmp_path)
    code = (
        "import torch; from transformers import AutoModelForCausalLM;"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, trust_remote_code=True);"
        f"print(float(model(torch.tensor({text().tolist()})).logits.double().sum()))"
    )
    theirs = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert float(theirs.stdout) == float(model(text()).logits.double().sum())


def test_it_generates_from_rows_without_padding() -> None:
    model, ids = model_of("gru").eval(), text()
    mask = torch.ones_like(ids)
    longer = model.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False)
    assert torch.equal(longer[:, TOKENS], model(ids).logits[:, -1].argmax(-1))
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="reads padding"):
        model.generate(ids, attention_mask=mask, max_new_tokens=2)


def test_an_unknown_cell_is_named() -> None:
    with pytest.raises(ValueError, match=r"cell is .elman.: it must be one of lstm, gru"):
        hf_config({**SIZES, "cell": "elman"})
