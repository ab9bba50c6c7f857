"""The model's config: its sources, overrides, dropout, and longer rotary positions."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from harness.config.run_file import load_run_config
from harness.errors import ConfigError
from harness.files import hub
from harness.plan import model_config
from harness.plan.model_config import find_model_config, load_model_config, preset_names
from harness.plan.rotary import _moved
from tests.engine.small import MODEL
from tests.tables import beside

Config = dict[str, Any]
LLAMA: Config = {"model_type": "llama", "hidden_size": 64, "rope_parameters": {"rope_theta": 1e4}}
ROTATED: Config = {**MODEL, "head_dim": 16, "max_position_embeddings": 64}
NEW = {**ROTATED, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
OLD = {**ROTATED, "rope_theta": 500.0}


def load(*words: str) -> tuple[Config, str]:
    return load_model_config(load_run_config(None, words))


def load_from(folder: Path, config: Config, *words: str) -> Config:
    (folder / "config.json").write_text(json.dumps(config))
    return load(f"model.name={folder}", *words)[0]


def problem_of(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*words)
    (problem,) = caught.value.problems
    return problem


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_a_preset_a_folder_and_a_file(folder: Path) -> None:
    config, source = load()
    assert (source, config["model_type"]) == ("preset tiny", "llama")
    assert "tiny" in preset_names()
    for path in (folder, folder / "config.json"):
        assert load(f"model.name={path}") == (LLAMA, str(path))


@pytest.mark.parametrize("name", ["org/decoder", "org/llama-1b", "gpt2", "gpt2-xl"])
def test_a_hub_id_is_asked_last(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def from_hub(name: str, origin: str, key: str) -> Path:
        asked.append(name)
        return folder / "config.json"

    monkeypatch.setattr(model_config, "_from_hub", from_hub)
    assert load(f"model.name={name}") == (LLAMA, name)
    assert asked == [name]


@pytest.mark.parametrize("name", ["gpt2", "org/gpt2_124m"])
def test_no_hub_is_not_awaited(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants  # it has read the environment already

    def unknown(*_: object) -> None:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    problem = problem_of(f"model.name={name}")
    assert "the hub cannot be reached from here: set model.name=FOLDER" in problem
    assert "; did you mean gpt2-124m" in problem


def test_missing_folder_is_not_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Presets have no weights."""
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.chdir(tmp_path)
    for name in ("my-modle", "./my-modle"):
        with pytest.raises(ConfigError, match=r"no folder|no such") as caught:
            find_model_config(name, "command line", "model.init_from")
        assert str(caught.value).endswith("did you mean my-model?")
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "my-model").rename(tmp_path / "runs" / "first" / "export")
    for name in ("runs/frist/export", "./run/first/exports"):
        with pytest.raises(ConfigError, match="there is no such file or folder; did") as caught:
            find_model_config(name, "command line", "model.init_from")
        assert str(caught.value).endswith("did you mean runs/first/export?")
    with pytest.raises(ConfigError, match=r"there is no such file or folder$"):
        find_model_config("runs/frist/x", "command line", "model.init_from")


RECURRENT = {"model_type": "recurrent", "vocab_size": 512, "hidden_size": 64}


@pytest.mark.parametrize(("changes", "expected"), beside(__file__, "model_config.toml")["broken"])
def test_a_broken_config_is_named(tmp_path: Path, changes: Any, expected: str) -> None:
    text = changes if isinstance(changes, str) else json.dumps({**RECURRENT, **(changes or {})})
    if changes is not None:
        (tmp_path / "config.json").write_text(text)
    assert expected in problem_of(f"model.name={tmp_path}").replace(str(tmp_path), "SOURCE")


def test_overrides_change_add_merge_and_take_away(folder: Path) -> None:
    words = ["hidden_size=32", "num_hidden_layers=2"]
    words += ["rope_parameters={rope_type='linear', factor=2.0}"]
    config, _ = load(f"model.name={folder}", *(f"model.overrides.{word}" for word in words))
    assert (config["hidden_size"], config["num_hidden_layers"]) == (32, 2)
    expected = {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}
    assert config["rope_parameters"] == expected
    config, _ = load("model.name=gemma-2-9b", "model.overrides.sliding_window=null")
    assert config["sliding_window"] is None
    config, _ = load("model.name=mistral-7b-v0.3", "model.overrides.sliding_window=4096")
    assert config["sliding_window"] == 4096


def test_per_layer_lists_match_the_overridden_layer_count(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    config = {"model_type": "gemma3_text", "num_hidden_layers": 3, "layer_types": kinds}
    two = load_from(tmp_path, config, "model.overrides.num_hidden_layers=2")
    assert two["layer_types"] == kinds[:2]
    words = ("model.overrides.num_hidden_layers=6", f"model.overrides.layer_types={2 * kinds}")
    assert load_from(tmp_path, config, *words)["layer_types"] == 2 * kinds


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "phi3", "falcon", "gpt_neox", "gptj"])
def test_dropout_sets_every_probability_that_transformers_has(tmp_path: Path, family: str) -> None:
    """A config.json may omit the keys: gpt2's then default to 0.1."""
    transformers = pytest.importorskip("transformers")
    config = load_from(tmp_path, {"model_type": family}, "model.dropout=0.25")
    config.pop("model_type")
    built = transformers.AutoConfig.for_model(family, **config).to_dict()
    heads_only = ("classifier_dropout", "summary_first_dropout")  # not part of a causal LM
    dropouts = {key: value for key, value in built.items() if key.endswith(("dropout", "pdrop"))}
    probabilities = {value for key, value in dropouts.items() if key not in heads_only}
    assert probabilities == {0.25}


def test_each_kind_of_dropout_is_set_by_itself(folder: Path) -> None:
    config, _ = load("model.name=gpt2-124m", "model.dropout=0.1", "model.residual_dropout=0.3")
    assert [config[f"{kind}_pdrop"] for kind in ("attn", "embd", "resid")] == [0.1, 0.1, 0.3]
    config, _ = load("model.name=llama-1b", "model.attention_dropout=0.2")
    assert config["attention_dropout"] == 0.2
    assert load(f"model.name={folder}")[0] == LLAMA


def frequencies(config: Config) -> Any:
    import torch

    from harness.models.skeleton import hf_config, skeleton

    model = skeleton(hf_config(config), torch.float32)
    assert model.config.rope_parameters["rope_theta"] == 500.0
    return model.model.rotary_emb.inv_freq


@pytest.mark.parametrize("config", [NEW, OLD], ids=["rope_parameters", "rope_theta"])
def test_frequencies_are_those_of_the_factor(config: Config, tmp_path: Path) -> None:
    import torch

    before = frequencies(config)
    linear = load_from(tmp_path, config, "model.context=160", "model.rope=linear")
    assert linear["max_position_embeddings"] == 160
    torch.testing.assert_close(frequencies(linear), before / 2.5)
    stretched = load_from(tmp_path, config, "model.context=256")
    rotary = stretched.get("rope_parameters") or stretched["rope_scaling"]
    assert rotary["original_max_position_embeddings"] == 64
    yarn = frequencies(stretched)
    # Frequencies that turn often within the old positions stay; those below one turn are stretched.
    torch.testing.assert_close(yarn[0], before[0])
    torch.testing.assert_close(yarn[-1], before[-1] / 4)
    ratios = before / yarn
    assert (ratios.diff() >= -1e-6).all()


def test_former_rotary_keys_move_into_the_table() -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    moved = _moved({"rope_theta": 5e5, "rotary_pct": None, "rope_scaling": scaling})
    assert moved == {"rope_parameters": {"rope_theta": 5e5, **scaling}}


@pytest.mark.parametrize("changes", [{}, {"partial_rotary_factor": 0.5}], ids=["whole", "in part"])
@pytest.mark.parametrize("config", [NEW, OLD], ids=["rope_parameters", "rope_theta"])
def test_ntk_equals_dynamic_at_full_length(config: Config, changes: Config, tmp_path: Path) -> None:
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from harness.models.skeleton import hf_config

    config = {**config, **changes}
    changed = hf_config(load_from(tmp_path, config, "model.context=256", "model.rope=ntk"))
    assert changed.max_position_embeddings == 256
    dynamic = hf_config(config)
    dynamic.rope_parameters |= {"rope_type": "dynamic", "factor": 1.0}
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](dynamic, "cpu", seq_len=256)
    theta, width = changed.rope_parameters["rope_theta"], 2 * len(expected)
    assert theta > 4 * 500.0
    torch.testing.assert_close(theta ** (-torch.arange(0, width, 2) / width), expected)
    assert changed.rope_parameters["rope_type"] == "default"
