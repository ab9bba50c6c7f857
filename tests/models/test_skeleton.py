"""Models without weights, and which of their parameters have weight decay."""

import copy
import json
from collections import defaultdict

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_flash_attention_utils import _process_flash_attention_kwargs

from harness.layout.attention_table import IGNORING_DOCUMENTS
from harness.layout.releases import is_older
from harness.layout.world import World
from harness.models.attention import separates_documents
from harness.models.skeleton import described_parameters, hf_config, skeleton, tied_names
from harness.models.units import units
from harness.plan.attention import AttentionNeeds
from harness.plan.model_config import find_model_config, preset_names
from tests.engine.small import CONFIGS, MODEL
from tests.models.small import attention_of, built
from tests.tables import beside

TABLES = beside(__file__, "skeleton.toml")
LLAMA = {**MODEL, "num_hidden_layers": 2}


def empty(config: dict[str, object]):
    return skeleton(hf_config(config), torch.float32)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_of_a_model_with_its_own_code(tied: bool, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hub"))
    monkeypatch.syspath_prepend(str(tmp_path / "hub"))
    folder = tmp_path / f"own_{tied}"
    folder.mkdir()
    classes = {"AutoConfig": "code.OwnConfig", "AutoModelForCausalLM": "code.OwnForCausalLM"}
    config = {**LLAMA, "model_type": "own", "auto_map": classes, "tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(TABLES["own_code"])
    expected = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
    assert tied_names(config, str(folder), True) == expected
    with pytest.raises(ValueError, match="own code, which --trust-remote-code runs"):
        hf_config(config, str(folder))


def test_auto_attention_assumes_no_sdpa_for_custom_code() -> None:
    config = {**LLAMA, "model_type": "own", "auto_map": {"AutoConfig": "code.OwnConfig"}}
    needs = AttentionNeeds(World(), "bf16", config, None, 128, documents=False)
    assert needs.chosen()[0] == "eager"


MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4}
DECAYING = {"llama": LLAMA, "gpt2": CONFIGS["gpt2"], "mixtral": MIXTRAL}


@pytest.mark.parametrize("name", DECAYING)
def test_only_matrices_in_layers_decay(name: str) -> None:
    expected = {*TABLES["decayed"][name]}
    decayed = {p.name for p in described_parameters(empty(DECAYING[name])) if p.matrix}
    assert {name for name in decayed if ".1." not in name} == expected
    assert {name.replace(".1.", ".0.") for name in decayed} == expected


def test_a_skeleton_holds_buffers_and_parameters_in_pieces() -> None:
    model = empty(LLAMA)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}
    named = [slot[0] for piece in units(model) for slot in piece.parameters()]
    assert sorted(named) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize("name", preset_names())
def test_the_config_that_a_run_is_resumed_by_stays_as_it_was(name: str) -> None:
    """transformers writes into nested tables; plan.json would then differ from the next plan."""
    config, _ = find_model_config(name)
    before = copy.deepcopy(config)
    hf_config(config)
    assert config == before


def test_an_unknown_model_type_is_refused() -> None:
    with pytest.raises(ValueError, match="nonesuch"):
        hf_config({**LLAMA, "model_type": "nonesuch"})


@pytest.mark.parametrize(
    ("family", "separates"), [*TABLES["separates"].items(), ("falcon", not is_older((5, 24)))]
)
def test_which_models_heed_document_boundaries(family: str, separates: bool) -> None:
    model = skeleton(hf_config(CONFIGS[family]), torch.float32, attention_of(CONFIGS[family]))
    assert separates_documents(model) is separates
    assert (family in IGNORING_DOCUMENTS) is not separates or family == "falcon"


GEMMA2 = {**LLAMA, "model_type": "gemma2", "head_dim": 8, "query_pre_attn_scalar": 8}
GEMMA2 |= {"final_logit_softcapping": None, "pad_token_id": 0}


def test_scores_are_soft_capped_or_the_attention_is_refused() -> None:
    """A cap that an attention silently ignores would train another model."""
    ids = torch.arange(12).view(1, 12)

    def logits(cap: float | None) -> torch.Tensor:
        model = built({**GEMMA2, "attn_logit_softcapping": cap})
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.data.mul_(50)  # initial scores are too small for a cap
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False).logits

    assert not torch.allclose(logits(0.5), logits(None))
    assert torch.allclose(logits(1e6), logits(None), atol=1e-4)
    if is_older((5, 21)):  # only the plan rejects it
        return
    with pytest.raises(ValueError, match="does not support an attention implementation"):
        skeleton(hf_config(GEMMA2), torch.float32, "sdpa")
    query, cap = torch.zeros(1, 1, 2, 8), {"softcap": 50.0}
    with pytest.raises(ValueError, match="does not support `softcap`"):
        sdpa_attention_forward(torch.nn.Module(), query, query, query, None, **cap)
    with pytest.raises(ValueError, match="does not support `softcap`"):
        _process_flash_attention_kwargs(2, 2, True, **cap, supports_mapping=defaultdict(bool))
