"""The attention of a run: compared at the start, replaced if it differs, kept on resume."""

from typing import Any

import pytest
import torch

from harness.config.run_file import load_run_config
from harness.errors import ConfigError
from harness.layout.world import World
from harness.models import varlen
from harness.plan.make import make_plan
from harness.plan.plan import Plan
from harness.run import attention as settling
from harness.run.attention import Different, compare
from tests.gates.models import LEARNED
from tests.tiers import rest_in_gate

CPU = torch.device("cpu")
GPU = World(accelerator="cuda", gpu="h100-80")
WINDOWS = ("model.overrides.model_type=mistral", "model.overrides.sliding_window=64")
in_turn = varlen._in_turn


def late(q: Any, k: Any, v: Any, bounds: torch.Tensor, *more: Any, **how: Any) -> Any:
    """Return the kernel's output for documents that begin one token late."""
    bounds = torch.cat([bounds[:1], bounds[1:-1] + 1, bounds[-1:]])
    return in_turn(q, k, v, bounds, *more, **how)


def wide(*states: Any, before: int, **how: Any) -> Any:
    """Return the kernel's output without windows."""
    return in_turn(*states, before=-1, **how)


def one_more(*states: Any, before: int, **how: Any) -> Any:
    """Return the kernel's output for windows that are one token longer."""
    return in_turn(*states, before=before + (before >= 0), **how)


def planned(*words: str, precision: str = "bf16") -> Plan:
    """Return a plan for a GPU, whose kernel here is the CPU's."""
    ds: dict[str, Any] = {"zero_optimization": {"stage": 1}}
    ds |= {} if precision == "fp32" else {precision: {"enabled": True}}
    world = World() if precision == "fp32" else GPU
    return make_plan(load_run_config(None, words), ds, world)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank without a process group."""
    monkeypatch.setattr(settling, "first_problem", lambda problem: problem)


@pytest.mark.parametrize("precision", rest_in_gate("runs", ["fp32", "bf16"]))
@pytest.mark.parametrize("defect", [late, wide, one_more, lambda *a, **k: in_turn(*a, **k) / 0])
def test_a_kernel_that_is_wrong_differs(defect: Any, precision: str, monkeypatch) -> None:
    plan = planned(*WINDOWS, "model.attention=varlen", precision=precision)
    compare(plan, "varlen", "sdpa", CPU)
    monkeypatch.setattr(varlen, "_in_turn", defect)
    with pytest.raises(Different, match="but rounding explains only"):
        compare(plan, "varlen", "sdpa", CPU)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "mixtral", "phi3", "qwen2", "qwen3"])
def test_every_kind_of_family_is_compared(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, kernel, layers = planned("model.attention=sdpa"), varlen._in_turn, list[int]()
    object.__setattr__(plan, "model_config", LEARNED[family])

    def seen(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        layers.append(len(layers))
        return kernel(query, *args, **kwargs)

    monkeypatch.setattr(varlen, "_in_turn", seen)
    compare(plan, "varlen", "sdpa", CPU)
    assert layers  # both were computed: equality is not identity


def test_a_config_without_key_heads_has_those_of_its_family() -> None:
    config = {"model_type": "mistral", "hidden_size": 512, "num_attention_heads": 32}
    for key_heads, expected in (({}, (8, 2)), ({"num_key_value_heads": None}, (2, 2))):
        small = settling.small_config({**config, **key_heads})
        assert (small["num_attention_heads"], small["num_key_value_heads"]) == expected


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("defect", [wide, broken])
def test_what_differs_or_fails_falls_back_with_an_event(defect: Any, monkeypatch) -> None:
    plan = planned(*WINDOWS)
    assert plan.config.model.attention == "varlen"
    assert settling.verify_attention(plan, CPU) == (plan, [])
    monkeypatch.setattr(varlen, "_in_turn", defect)
    masked, (event,) = settling.verify_attention(plan, CPU)
    assert masked.config.model.attention == "sdpa"
    assert masked.to_json()["run"]["model"]["attention"] == "sdpa"
    assert event["kind"] == "fallback"
    assert "varlen did not match sdpa on this device" in event["message"]
    assert ("only supports Ampere" in event["message"]) == (defect is broken)


@pytest.mark.usefixtures("alone")
def test_the_users_own_choice_is_refused_where_it_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "_in_turn", wide)
    with pytest.raises(ConfigError, match=r"model\.attention=varlen: varlen did not match sdpa"):
        settling.verify_attention(planned(*WINDOWS, "model.attention=varlen"), CPU)
