"""LSTM and GRU decoders against torch's cells; carried states against long windows."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.layout.state_size import RECURRENT_KEYS, carried_numbers
from harness.models.recompute import checkpoint_layers
from harness.models.recurrent import RecurrentConfig
from harness.models.recurrent_state import WINDOWS
from harness.models.skeleton import hf_config
from tests.models.small import built

SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "eos_token_id": 0}
MODELS: dict[str, dict[str, Any]] = {
    "lstm": {"model_type": "recurrent", "cell": "lstm", "recurrent_size": 24, **SIZES},
    "gru": {"model_type": "recurrent", "cell": "gru", **SIZES},
}
MODELS["mamba2"] = {"model_type": "mamba2", "state_size": 8, "num_heads": 4, "head_dim": 8, **SIZES}
MODELS["mamba2"] |= {"n_groups": 2, "chunk_size": 4, "bos_token_id": 0, "pad_token_id": 0}
ROWS, TOKENS = 3, 20


def model_of(kind: str) -> Any:
    return built(MODELS[kind])


@pytest.mark.parametrize(
    "config",
    [*MODELS.values(), {"model_type": "recurrent", "cell": "gru"}, {"model_type": "mamba2"}],
)
def test_the_plan_counts_a_rows_numbers(config: dict[str, Any]) -> None:
    """Also for a config that leaves its sizes to its class."""
    window = WINDOWS[config["model_type"]]
    assert carried_numbers(config) == window.numbers(hf_config(config))


def test_the_plan_knows_the_keys_that_the_class_reads() -> None:
    assert {*vars(RecurrentConfig)["__annotations__"]} - {"model_type"} == RECURRENT_KEYS


def text() -> torch.Tensor:
    return torch.randint(64, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))


def window_of(model: Any, states: torch.Tensor) -> Any:
    return WINDOWS[model.config.model_type](model.config, states, torch.float32)


def begin(model: Any) -> torch.Tensor:
    return torch.zeros(ROWS, WINDOWS[model.config.model_type].numbers(model.config))


@pytest.mark.parametrize("kind", MODELS)
def test_recurrent_windows_with_state_equal_one_long_window(kind: str) -> None:
    model, ids = model_of(kind), text()
    states, parts = begin(model), []
    for ids_of_window in ids.split(7, dim=1):  # which no chunk of a scan divides
        window = window_of(model, states)
        logits = model(input_ids=ids_of_window, use_cache=False, **window.keywords).logits
        parts.append(logits)
        states = window.after
        assert states.shape == begin(model).shape
        assert not states.requires_grad
    long = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(parts, 1), long, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_layers_that_are_computed_again_read_the_same_states(kind: str) -> None:
    gradients = []
    for again in (False, True):
        model = model_of(kind)
        if again:
            checkpoint_layers(model, "full")
        first = window_of(model, begin(model))
        model(input_ids=text()[:, :9], use_cache=False, **first.keywords)
        second = window_of(model, first.after)
        logits = model(input_ids=text()[:, 9:], use_cache=False, **second.keywords).logits
        logits.logsumexp(-1).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
        assert one.abs().sum() > 0


CELLS = {"lstm": nn.LSTM, "gru": nn.GRU}


@pytest.mark.parametrize("cell", CELLS)
def test_a_cell_computes_what_torchs_module_does(cell: str) -> None:
    ours = model_of(cell).model.layers[0].cell
    size = SIZES["hidden_size"]
    theirs = CELLS[cell](size, ours.weight_hh.shape[1], batch_first=True)
    theirs.load_state_dict({f"{name}_l0": value for name, value in ours.state_dict().items()})
    inputs = torch.randn(ROWS, TOKENS, size)
    torch.testing.assert_close(ours(inputs)[0], theirs(inputs)[0])
    assert bool((ours.bias_ih[24:48] == 1).all()) == (cell == "lstm")  # it starts by remembering


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


def test_labels_give_the_loss_that_other_models_give() -> None:
    ids = text()
    labels = ids.clone()
    labels[:, :3] = -100
    answer = model_of("gru")(input_ids=ids, labels=labels)
    logits, targets = answer.logits[:, 2:-1].flatten(0, 1), ids[:, 3:].flatten()
    torch.testing.assert_close(answer.loss, nn.functional.cross_entropy(logits, targets))


def test_recurrent_model_generates_from_unpadded_rows() -> None:
    model, ids = model_of("gru").eval(), text()
    mask = torch.ones_like(ids)
    longer = model.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False)
    assert torch.equal(longer[:, TOKENS], model(ids).logits[:, -1].argmax(-1))
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="also reads padding"):
        model.generate(ids, attention_mask=mask, max_new_tokens=2)


def test_an_unknown_cell_is_named() -> None:
    with pytest.raises(ValueError, match=r"cell is .elman.: it must be one of lstm, gru"):
        hf_config({**MODELS["lstm"], "cell": "elman"})
