"""Each table of families.toml against the model that transformers builds, and a new table.

test_shape.py checks names and shapes of all parameters, ../estimate/test_activations.py
activations.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from harness.config.run_file import load_run_config
from harness.layout import families
from harness.layout.families import FAMILIES, Family, family_of, read_families
from harness.layout.releases import is_older
from harness.layout.shape import Shape
from harness.layout.world import World
from harness.models.skeleton import hf_config
from harness.plan.make import make_plan
from tests.estimate.test_activations import FAMILIES as TRACED
from tests.layout.test_shape import our_tensors, transformers_tensors
from tests.tables import beside

LIBRARY = (Path(families.__file__).parent / "families.toml").read_text("utf-8")
TABLES = read_families(LIBRARY)
WRONG, NEW = beside(__file__, "families.toml").values()


def small_model(model_type: str, **config: Any) -> PreTrainedModel:
    """Return two layers with the class's default sizes, on meta."""
    with init_empty_weights():
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(model_type, **{"num_hidden_layers": 2, **config})
        )


@pytest.mark.parametrize("model_type", TABLES)
def test_dropouts_and_special_tokens_match_config_class(model_type: str) -> None:
    heads_only = {"classifier_dropout", "summary_first_dropout"}  # not part of a causal LM
    table, config = TABLES[model_type], AutoConfig.for_model(model_type)
    dropouts = {key for key in config.to_dict() if key.endswith(("dropout", "pdrop"))}
    assert dropouts - heads_only == set(table.dropouts)
    assert {key: getattr(config, key) for key in table.tokens} == dict(table.tokens)


@pytest.mark.parametrize("model_type", [n for n in FAMILIES if FAMILIES[n].size_keys("head")])
def test_heads_that_do_not_divide_are_rejected_as_by_the_class(model_type: str) -> None:
    family, config = FAMILIES[model_type], AutoConfig.for_model(model_type).to_dict()
    heads, hidden = family.size_keys("heads")[0], family.size_keys("hidden")[0]
    config |= {heads: 3, "num_key_value_heads": 1, hidden: 64, "head_dim": 16}

    def is_rejected(read: Callable[[dict[str, Any]], Any]) -> bool:
        try:
            read(config)
        except ValueError as error:
            return "multiple" in str(error)
        return False

    assert is_rejected(hf_config) == is_rejected(Shape.from_hf)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_is_computed_from_the_lines_is_so_in_the_model(model_type: str) -> None:
    family, model = FAMILIES[model_type], small_model(model_type)
    layer_norms = any(
        isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("LayerNorm")
        for module in model.modules()
    )
    assert family.layer_norm == layer_norms
    lookups = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    assert family.learned_positions == (len(lookups) > 1)
    rotary = any("Rotary" in type(module).__name__ for module in model.modules())
    assert rotary == (not family.learned_positions and not family.alibi)


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if not FAMILIES[name].gated_mlp])
def test_the_activation_is_the_config_class_s(model_type: str) -> None:
    config = AutoConfig.for_model(model_type)
    keys = ("activation_function", "hidden_act", "activation")
    theirs = [getattr(config, key) for key in keys if hasattr(config, key)]
    assert theirs == ([] if model_type == "bloom" else [FAMILIES[model_type].activation])


@pytest.mark.parametrize("model_type", FAMILIES)
def test_sdpa_is_rejected_where_transformers_rejects_it(model_type: str) -> None:
    supported = type(small_model(model_type))._supports_sdpa
    if model_type == "gemma2" and is_older((5, 21)):
        supported = False  # it accepted Gemma 2, and ignored the cap
    assert supported == (not FAMILIES[model_type].sdpa_lacks)


def test_a_family_is_traced_only_where_a_test_traces_it() -> None:
    traced = {name for name, family in FAMILIES.items() if "activations" in family.compared}
    partly = {"falcon"}  # only with one key head for all queries, which its larger models lack
    assert traced == {config["model_type"] for config in TRACED.values()} - partly


def test_the_docs_name_the_families_that_are_traced() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs/memory.md"
    (row,) = [line for line in docs.read_text("utf-8").splitlines() if line.startswith("| traced")]
    names = row.split("activations of ")[1].split(", with")[0].replace(" and ", ", ").split(", ")
    assert set(names) == {n for n, family in FAMILIES.items() if "activations" in family.compared}


def test_a_model_type_without_a_table_has_every_default() -> None:
    assert family_of("mamba") == Family("mamba")
    assert "mamba" not in FAMILIES
    assert "gptj" not in FAMILIES  # a table without layers
    assert family_of("gptj").dropouts == ("attn_pdrop", "embd_pdrop", "resid_pdrop")


def test_what_was_compared_is_not_inherited() -> None:
    tables = read_families('[a]\ncompared = ["liger"]\ndivides_rows = true\n[b]\nlike = "a"\n')
    assert tables["b"] == Family("b", divides_rows=True)


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_a_table_that_says_what_no_family_has(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_families(text)


assert not NEW.keys() <= TABLES.keys(), "all of them were added: put others here"


@pytest.mark.parametrize("model_type", [name for name in NEW if name not in TABLES])
def test_a_new_family_is_one_table(model_type: str, monkeypatch, tmp_path) -> None:
    """It is counted, planned and estimated without any other change."""
    added = read_families(f"{LIBRARY}\n[{model_type}]\n{NEW[model_type]}")[model_type]
    monkeypatch.setitem(families._TABLES, model_type, added)
    monkeypatch.setitem(FAMILIES, model_type, added)
    config = AutoConfig.for_model(model_type)
    assert our_tensors(Shape.from_hf(config.to_dict())) == transformers_tensors(config)
    (tmp_path / "config.json").write_text(
        AutoConfig.for_model(model_type, num_hidden_layers=2).to_json_string(use_diff=False)
    )
    words = [f"model.name={tmp_path}", "model.dropout=0", "plan.force=true"]
    plan = make_plan(load_run_config(None, words), {}, World())
    assert plan.estimate.worst.evidence("activations: mlp") == "guessed"
    assert not [event for event in plan.events if event["kind"] == "unknown_architecture"]
