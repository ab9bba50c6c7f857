"""model.overrides: either they are built as written, or refused with a correction."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from harness.config.run_file import load_run_config
from harness.errors import ConfigError
from harness.models.skeleton import hf_config
from harness.plan.model_config import load_model_config
from harness.plan.overrides import already_so
from tests.engine.small import MODEL
from tests.tables import beside

Config = dict[str, Any]
TABLES = beside(__file__, "overrides.toml")
YARN = '{rope_type="yarn", factor=4.0, original_max_position_embeddings=512}'
NEW = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
OLD = {"rope_theta": 1e6}
BOTH = {**NEW, **OLD, "rope_scaling": None}
LAYERS = TABLES["layers"]
HAS_NO_DEFAULT = ("gemma4_assistant",)
QWEN = {**MODEL, "model_type": "qwen2", "sliding_window": None, "use_sliding_window": False}


def load(folder: Path, config: Config, *overrides: str, words: tuple[str, ...] = ()) -> Config:
    (folder / "config.json").write_text(json.dumps({**MODEL, **config}))
    named = [f"model.overrides.{word}" for word in overrides]
    run = load_run_config(None, [f"model.name={folder}", *named, *words])
    return load_model_config(run)[0]


def problem_of(folder: Path, config: Config, *overrides: str, words: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, config, *overrides, words=words)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize("config", [NEW, OLD, BOTH], ids=["new", "old", "both"])
@pytest.mark.parametrize(("word", "expected"), TABLES["positions"])
def test_rotary_override_reaches_model_in_any_config_style(
    config: Config, word: str, expected: Config, tmp_path: Path
) -> None:
    assert hf_config(load(tmp_path, config, word)).rope_parameters == expected


@pytest.mark.parametrize(("config", "word"), TABLES["own_reader"])
def test_rotary_overrides_with_their_own_reader(config: Config, word: str, tmp_path: Path) -> None:
    before = hf_config({**MODEL, **config}).rope_parameters
    assert hf_config(load(tmp_path, config, word)).rope_parameters != before


@pytest.mark.gate("plan")
def test_every_class_that_rotates_takes_an_override_in_its_table(tmp_path: Path) -> None:
    tried = []
    for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        config_class: Any = CONFIG_MAPPING[name]
        config = config_class().to_dict() if name not in HAS_NO_DEFAULT else {}
        folder = Path(inspect.getfile(config_class)).parent
        source = "".join(path.read_text() for path in folder.glob("modeling_*.py"))
        if "config.rope_parameters" not in source or not (table := config.get("rope_parameters")):
            continue
        kinds = [kind for kind, entry in table.items() if isinstance(entry, dict)]
        word = f"rope_parameters.{kinds[0]}.rope_theta=123" if kinds else "rope_theta=123"
        built = hf_config(load(tmp_path, config, word)).rope_parameters
        assert (built[kinds[0]] if kinds else built)["rope_theta"] == 123, name
        tried.append(name)
    assert len(tried) > 80


def test_rope_override_replaces_other_type_and_merges_same(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    for config in ({"rope_parameters": {**linear, **OLD}}, {**OLD, "rope_scaling": linear}):
        other = load(tmp_path, config, f"rope_scaling={YARN}")
        assert hf_config(other).rope_parameters["factor"] == 4.0
        same = hf_config(load(tmp_path, config, "rope_scaling.factor=2.0")).rope_parameters
        assert same == {**linear, "factor": 2.0, **OLD}


def test_layers_that_rotate_by_their_kind_are_overridden_by_it(tmp_path: Path) -> None:
    config = {"model_type": "gemma3_text", "rope_parameters": LAYERS}
    word = "rope_parameters.full_attention.rope_theta=5e6"
    built = hf_config(load(tmp_path, config, word)).rope_parameters
    assert [built[kind]["rope_theta"] for kind in LAYERS] == [5e6, 1e4]
    for word in ("rope_theta=5e6", f"rope_scaling={YARN}", "rope_local_base_freq=5e6"):
        problem = problem_of(tmp_path, config, word)
        assert "set model.overrides.rope_parameters.full_attention" in problem
    problem = problem_of(tmp_path, config, "rope_parameters.rope_theta=5e6")
    assert problem.endswith("set model.overrides.rope_parameters.full_attention.rope_theta")


@pytest.mark.parametrize(("config", "words", "expected"), TABLES["unread"])
def test_an_override_that_changes_nothing_is_refused(
    config: Config, words: list[str], expected: str, tmp_path: Path
) -> None:
    """refusals/model.toml has those of common families."""
    problem = problem_of(tmp_path, config, *words)
    assert problem.startswith(f"model.overrides.{words[0].partition('=')[0]} (command line) ")
    assert expected in problem


@pytest.mark.parametrize(("words", "expected"), TABLES["refused"])
def test_rotary_setting_unread_or_missing(words: list[str], expected: str, tmp_path: Path) -> None:
    for config in (NEW, OLD):
        with pytest.raises(ConfigError) as refused:
            load(tmp_path, config, *words)
        assert expected in str(refused.value)


def test_size_override_works_under_each_config_name(tmp_path: Path) -> None:
    experts = {"model_type": "qwen3_moe", "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    for names in (["num_local_experts"], ["num_experts"], ["num_experts", "num_local_experts"]):
        config = {**experts, **dict.fromkeys(names, 4)}
        for name in ("num_experts", "num_local_experts"):
            assert hf_config(load(tmp_path, config, f"{name}=2")).num_experts == 2


def test_lists_that_are_no_list_of_layers_do_not_ask_for_more(tmp_path: Path) -> None:
    lists = {"architectures": [*"abc"], "eos_token_id": [1, 2, 3], "mlp_only_layers": [0, 1, 2]}
    config = load(tmp_path, {"model_type": "qwen3_moe", **lists}, "num_hidden_layers=4")
    assert {key: config[key] for key in lists} == lists


def test_windows_of_a_config_that_says_which_layers_slide(tmp_path: Path) -> None:
    """The advice names everything that is needed; once followed, it is built."""
    config = {**QWEN, "layer_types": ["full_attention"] * 3}
    problem = problem_of(tmp_path, config, "sliding_window=8")
    assert "set model.overrides.use_sliding_window=true and model.overrides.layer_types" in problem
    words = ("use_sliding_window=true", "sliding_window=8")
    late = load(tmp_path, QWEN, *words, "max_window_layers=2")
    assert hf_config(late).layer_types == [*["full_attention"] * 2, "sliding_attention"]
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    built = hf_config(load(tmp_path, config, *words, f"layer_types={json.dumps(kinds)}"))
    assert (built.sliding_window, built.layer_types) == (8, kinds)
    # A class without such a switch is not told to set it.
    config = {**MODEL, "model_type": "gemma2", "layer_types": ["full_attention"] * 3}
    assert "use_sliding_window" not in problem_of(tmp_path, config, "sliding_window=8")


def test_an_override_that_is_so_already_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, **NEW}))
    words = ("rope_theta=1000000", "hidden_size=64", f"vocab_size={MODEL['vocab_size']}")
    named = (f"model.overrides.{word}" for word in words)
    run = load_run_config(None, [f"model.name={tmp_path}", *named])
    expected = ["rope_theta", "vocab_size"]
    assert already_so({**MODEL, **NEW}, run) == expected


@pytest.mark.parametrize(("config", "word"), TABLES["read"])
def test_overrides_that_a_model_reads_are_taken(config: Config, word: str, tmp_path: Path) -> None:
    key, _, value = word.partition("=")
    named = {"true": True, "null": None}
    expected = named.get(value, value if key == "cell" else None)
    written = load(tmp_path, config, word)[key]
    assert written == (int(value) if value.isdigit() else expected)
