from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.config.run_file import load_run_config
from harness.errors import ConfigError
from harness.plan import model_config
from harness.plan.model_config import load_model_config, max_positions, preset_names

LLAMA = {"model_type": "llama", "hidden_size": 64, "rope_parameters": {"rope_theta": 1e4}}


def load(*assignments):
    return load_model_config(load_run_config(None, assignments))


def problems_of(*assignments):
    with pytest.raises(ConfigError) as caught:
        load(*assignments)
    return caught.value.problems


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


@pytest.fixture
def offline(monkeypatch, tmp_path):
    from huggingface_hub import constants  # which has read the environment already

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))


def test_the_default_is_a_preset():
    config, source = load()
    assert source == "preset tiny"
    assert config["model_type"] == "llama"
    assert "tiny" in preset_names()


def test_a_folder_and_a_file(folder):
    assert load(f"model.name={folder}") == (LLAMA, str(folder))
    path = folder / "config.json"
    assert load(f"model.name={path}") == (LLAMA, str(path))


@pytest.mark.parametrize("name", ["org/decoder", "org/llama-1b", "gpt2", "gpt2-xl"])
def test_a_hub_id_is_asked_last(name, folder, monkeypatch):
    asked = []

    def from_hub(name, origin, key):
        asked.append(name)
        return folder / "config.json"

    monkeypatch.setattr(model_config, "_from_hub", from_hub)
    assert load(f"model.name={name}") == (LLAMA, name)
    assert asked == [name]


def test_an_unknown_name_offline_lists_the_presets_and_the_nearest(offline):
    (problem,) = problems_of("model.name=gpt2")
    assert problem.startswith("model.name is 'gpt2' (command line): it is no preset (deepseek-v3, ")
    assert problem.endswith("did you mean gpt2-124m?")
    assert all(name in problem for name in preset_names())


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("tinny", "tiny"),
        ("lama-1b", "llama-1b"),
        ("Llama-1B", "llama-1b"),
        ("llama-3.1-8B-", "llama-3.1-8b"),
        ("gpt2-125m", "gpt2-124m"),
    ],
)
def test_a_preset_misspelt_is_not_looked_for_on_the_hub(name, meant, monkeypatch):
    monkeypatch.setattr(model_config, "_from_hub", lambda *_: pytest.fail("asked the hub"))
    (problem,) = problems_of(f"model.name={name}")
    assert problem.startswith(f"model.name is {name!r} (command line): it is no preset (")
    assert problem.endswith(f"no file or folder here; did you mean {meant}?")


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/config.json", "models/none.json"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(name, monkeypatch):
    monkeypatch.setattr(model_config, "_from_hub", lambda *_: pytest.fail("asked the hub"))
    (problem,) = problems_of(f"model.name={name}")
    assert "there is no such file or folder" in problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [("{", "cannot be read"), ("[1]", "holds no object"), ("{}", "has no model_type")],
)
def test_a_broken_config(folder, text, expected):
    (folder / "config.json").write_text(text)
    (problem,) = problems_of(f"model.name={folder}")
    assert expected in problem


def test_a_folder_without_a_config(tmp_path):
    (problem,) = problems_of(f"model.name={tmp_path}")
    assert "cannot be read" in problem


def test_overrides_change_add_and_merge(folder):
    config, _ = load(
        f"model.name={folder}",
        "model.overrides.hidden_size=32",
        "model.overrides.num_hidden_layers=2",
        "model.overrides.rope_parameters.factor=2.0",
    )
    assert config["hidden_size"] == 32
    assert config["num_hidden_layers"] == 2
    assert config["rope_parameters"] == {"rope_theta": 1e4, "factor": 2.0}


def test_an_override_of_null_takes_a_value_away():
    config, _ = load("model.name=gemma-2-9b", "model.overrides.sliding_window=null")
    assert config["sliding_window"] is None
    config, _ = load("model.name=mistral-7b-v0.3", "model.overrides.sliding_window=4096")
    assert config["sliding_window"] == 4096


def test_an_unknown_override_comes_with_the_nearest_key(folder):
    (problem,) = problems_of(f"model.name={folder}", "model.overrides.num_hiden_layers=2")
    assert problem.startswith(
        "model.overrides.num_hiden_layers (command line) is not a config key of"
    )
    assert problem.endswith("did you mean num_hidden_layers?")


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "phi3", "falcon", "gpt_neox", "gptj"])
def test_dropout_sets_every_probability_that_transformers_has(tmp_path, family):
    """A config.json may leave the keys out: gpt2's then default to 0.1."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    config, _ = load(f"model.name={tmp_path}", "model.dropout=0.25")
    config.pop("model_type")
    built = transformers.AutoConfig.for_model(family, **config).to_dict()
    heads_only = ("classifier_dropout", "summary_first_dropout")  # not part of a causal LM
    probabilities = {
        key: value
        for key, value in built.items()
        if key.endswith(("dropout", "pdrop")) and key not in heads_only
    }
    assert probabilities
    assert set(probabilities.values()) == {0.25}


def test_without_dropout_the_config_stays_as_it_is(folder):
    assert load(f"model.name={folder}")[0] == LLAMA


@pytest.mark.parametrize(
    ("config", "positions"),
    [({"max_position_embeddings": 64}, 64), ({"n_positions": 32}, 32), ({}, None)],
)
def test_positions(config, positions):
    assert max_positions(config) == positions


def test_each_kind_of_dropout_is_set_by_itself():
    config, _ = load("model.name=gpt2-124m", "model.dropout=0.1", "model.residual_dropout=0.3")
    assert (config["attn_pdrop"], config["embd_pdrop"], config["resid_pdrop"]) == (0.1, 0.1, 0.3)
    config, _ = load("model.name=llama-1b", "model.attention_dropout=0.2")
    assert config["attention_dropout"] == 0.2


def test_a_kind_of_dropout_that_a_family_lacks_is_refused():
    (problem,) = problems_of("model.name=llama-1b", "model.embedding_dropout=0.1")
    assert "llama models have only attention_dropout" in problem


def test_values_of_each_layer_are_as_many_as_the_layers_of_an_override(tmp_path):
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    config = {"model_type": "gemma3_text", "num_hidden_layers": 3, "layer_types": kinds}
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = load_run_config(None, [f"model.name={tmp_path}", "model.overrides.num_hidden_layers=2"])
    assert model_config.load_model_config(run)[0]["layer_types"] == kinds[:2]
    run = load_run_config(None, [f"model.name={tmp_path}", "model.overrides.num_hidden_layers=4"])
    with pytest.raises(ConfigError, match="layer_types has a value for each of 3 layers: set"):
        model_config.load_model_config(run)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"hidden_size": "64"}, "hidden_size (SOURCE) is '64': it must be a whole number of at"),
        ({"hidden_size": [64]}, "hidden_size (SOURCE) is [64]: it must be a whole number of at"),
        ({"cell": "rnn"}, "cell (SOURCE) is 'rnn': it must be one of lstm, gru"),
    ],
)
def test_sizes_of_a_family_that_is_not_counted_are_checked(
    tmp_path: Path, values: dict[str, Any], problem: str
) -> None:
    config = {"model_type": "recurrent", "vocab_size": 512, "hidden_size": 64, **values}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as error:
        load_model_config(load_run_config(None, [f"model.name={tmp_path}"]))
    (text,) = error.value.problems
    assert text.replace(str(tmp_path), "SOURCE").startswith(problem)
