"""Low-rank adapters, also on 4-bit weights, against peft in a plain loop; frozen parameters."""

import importlib.util
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from harness.estimate.states import model_states
from harness.layout.adapters import Adapters
from harness.layout.shape import Shape
from harness.models.skeleton import hf_config
from harness.plan.memory import memory_inputs
from tests.engine.engines import cells, engine_of, gathered, losses, share_of, written
from tests.engine.small import MIXTURES, MODEL, SEQ_LEN, VOCAB_SIZE
from tests.models.small import built
from tests.ranks import ranks
from tests.tables import beside

RANK, ALPHA, STEPS, LR = 4, 6.0, 4, 3e-3
LORA = {"rank": RANK, "alpha": ALPHA}
ALL = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
SHAPE = Shape.from_hf(MODEL)
ADAPTERS = {tensor.name: tensor.numel for tensor in Adapters(RANK).tensors(SHAPE)}
QUANTIZED = importlib.util.find_spec("bitsandbytes") is not None
TABLES = beside(__file__, "adapters.toml")
LAYOUTS = [*TABLES["layouts"], *(TABLES["layouts_4_bits"] if QUANTIZED else ())]
VARIANTS = {n: row for n, row in TABLES["variants"].items() if QUANTIZED or "bits" not in row}
Trained = tuple[list[float], dict[str, torch.Tensor]]
"""The losses of a plain loop, and the trained weights."""


def base_model() -> PreTrainedModel:
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(hf_config(MODEL))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with the base weights of the adapters."""
    folder = tmp_path_factory.mktemp("base")
    base_model().save_pretrained(folder)
    return str(folder)


def train_by_peft(model: Any, **settings: Any) -> Trained:
    """Train adapters of `model` in a plain loop."""
    import peft  # takes seconds, and the ranks do not need it

    values = {"r": RANK, "lora_alpha": ALPHA, "target_modules": ALL, **settings}
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **values))
    losses = plain_losses(adapted)
    weights = {n.removeprefix("base_model.model."): p for n, p in adapted.named_parameters()}
    return losses, {name: weight.detach() for name, weight in weights.items() if "lora" in name}


def plain_losses(model: torch.nn.Module) -> list[float]:
    """Train all unfrozen parameters with the run config's defaults; return the losses."""
    trained = [p for p in model.parameters() if p.requires_grad]
    lookups = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    groups = [
        {"params": [p for p in trained if p.ndim == 2 and p not in lookups], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim != 2 or p in lookups], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    # The same ids as in tests/engine/engines.py.
    ids = torch.randint(0, 24, (8, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(STEPS):
        logits = model(input_ids=ids[:, :-1]).logits
        loss = functional.cross_entropy(logits.reshape(-1, VOCAB_SIZE), ids[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def opened(base: str, bits: dict[str, Any] | None) -> Any:
    """Return the base model as others open it; `bits`: settings of weights in 4 bits."""
    if bits is not None:
        return quantized_by_transformers(base, **bits)
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def quantized_by_transformers(base: object, kind: str = "nf4", doubles: bool = True) -> Any:
    """Return the model as others open it: linear layers in 4 bits, the head unchanged."""
    how = {"quant_type": kind, "use_double_quant": doubles, "compute_dtype": torch.float32}
    bits = BitsAndBytesConfig(load_in_4bit=True, **{f"bnb_4bit_{k}": v for k, v in how.items()})
    how = {"dtype": torch.float32, "quantization_config": bits}
    return AutoModelForCausalLM.from_pretrained(base, **how).train()


@pytest.fixture(scope="module")
def by_peft(base: str) -> dict[bool, Trained]:
    """Return the same on the base weights and, where possible, on weights in 4 bits."""
    return {
        in_4_bits: train_by_peft(opened(base, {} if in_4_bits else None))
        for in_4_bits in ((False, True) if QUANTIZED else (False,))
    }


def adapted(ds: str, base: str, lora: dict[str, Any] = LORA, **model: Any) -> Any:
    return engine_of(ds, model={"name": base, "init_from": base, "lora": lora, **model})


def bytes_of(engine: Any) -> int:
    """Return the bytes of weights, master weights and moments on this rank, each storage once."""
    from harness.engine.deepspeed_0_19 import internals

    tensors = [getattr(p, "ds_tensor", p).data for p in engine.module.parameters()]
    tensors += [t for p in engine.module.parameters() for t in scales_of(p)]
    inner = internals.inner_optimizer(engine.engine)
    tensors += [p.data for group in inner.param_groups for p in group["params"]]
    if internals.is_zero3(engine.engine.optimizer):
        tensors += internals.zero3_flats(engine.engine.optimizer)
    for state in inner.state.values():
        tensors += [value for value in state.values() if torch.is_tensor(value) and value.ndim]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def scales_of(parameter: Any) -> list[torch.Tensor]:
    """Return the tensors that accompany the codes of a 4-bit weight."""
    state = getattr(parameter, "quant_state", None)
    states = [] if state is None else [state, *([state.state2] if state.nested else [])]
    return [value for each in states for value in vars(each).values() if torch.is_tensor(value)]


def estimated_bytes(engine: Any) -> int:
    """Return the estimate of the bytes that `bytes_of` counts."""
    states = model_states(memory_inputs(engine.plan), engine.share.data_rank)
    counted = ("parameters", "master", "moments")
    return sum(part.bytes for part in states if part.component in counted)


@pytest.mark.parametrize("layout", cells(LAYOUTS, ("zero1", "zero2 offload nf4")))
@ranks(2)
def test_adapters_train_as_peft_does(layout: str, base: str, by_peft: dict[bool, Trained]) -> None:
    """Checkpoints contain only adapters; only ZeRO 3 divides the frozen weights."""
    in_4_bits, is_half = layout.endswith("nf4"), "bf16" in layout
    expected, weights = by_peft[in_4_bits]
    lora = {**LORA, "quantize": "nf4"} if in_4_bits else LORA
    engine = adapted(layout.removesuffix(" nf4"), base, lora)
    assert expected[-1] < expected[0] - 0.02
    assert losses(engine, STEPS) == pytest.approx(expected, rel=2e-3 if is_half else 2e-6)
    saved = gathered({fragment.name for fragment in engine.fragments()})
    assert set().union(*saved) == ADAPTERS.keys()
    assert bytes_of(engine) == pytest.approx(estimated_bytes(engine), rel=0.01)
    trained = {name: tensor for name, tensor in engine.masters() if "lora" in name}
    assert trained.keys() == weights.keys()
    if not is_half:
        for name, tensor in trained.items():
            torch.testing.assert_close(tensor, weights[name], rtol=1e-3, atol=2e-6)
    if not in_4_bits:
        whole = sum(tensor.numel for tensor in SHAPE.tensors()) + sum(ADAPTERS.values())
        elements = engine.describe()["elements_held"]
        assert elements == (pytest.approx(whole / 2, rel=0.01) if "zero3" in layout else whole)


@pytest.fixture
def variant_by_peft(variant: str, base: str) -> Trained:
    row = VARIANTS[variant]
    return train_by_peft(opened(base, row.get("bits")), **row.get("peft", {}))


@pytest.mark.parametrize("variant", cells(VARIANTS, ("dora", "whole", "fp4")))
@ranks(2)
def test_lora_variants_equal_peft(variant: str, base: str, variant_by_peft: Trained) -> None:
    """bitsandbytes repacks weights at an evaluation, which must not end their gradients."""
    row, last = VARIANTS[variant], variant.split()[-1]
    lora = {**LORA, **({"quantize": "nf4"} if "bits" in row else {}), **row.get("lora", {})}
    checkpointing = last if last in ("full", "selective") else "none"
    engine = adapted(row["ds"], base, lora, checkpointing=checkpointing)
    for expected in variant_by_peft[0]:
        assert losses(engine, 1) == pytest.approx([expected], rel=2e-6)
        engine.eval_batch(share_of(engine)[0])
    assert len(variant_by_peft[0]) == STEPS
    if variant == "whole":
        saved = set().union(*gathered({fragment.name for fragment in engine.fragments()}))
        assert saved == {*ADAPTERS, "model.embed_tokens.weight", "lm_head.weight"}
        assert bytes_of(engine) == pytest.approx(estimated_bytes(engine), rel=0.01)


@pytest.mark.parametrize("layout", cells(["zero1", "zero3"], ("zero1",)))
@ranks(2)
def test_a_run_resumes_from_its_adapters_alone(layout: str, base: str) -> None:
    first, second = adapted(layout, base), adapted(layout, base)
    losses(first, STEPS)
    kept = {
        (fragment.name, kind, fragment.offset): tensor.clone()
        for fragment in first.fragments()
        for kind, tensor in fragment.tensors.items()
    }

    def fill(name: str, kind: str, offset: int, flat: Any, part: Any) -> None:
        if (name, kind, offset) in kept:  # the other rank has half of each replicated parameter
            flat.copy_(kept[name, kind, offset])

    second.restore(fill, lambda name: () if ":" in name else ("exp_avg", "exp_avg_sq"))
    second.refresh_weights()
    second.restore_scalars(first.scalars())
    assert losses(first, 2) == losses(second, 2)


@pytest.mark.parametrize("layout", cells(TABLES["frozen"], ("zero3",)))
@ranks(2)
def test_frozen_parameters_stay_and_adapters_train_as_plain_loop(layout: str) -> None:
    model = built(MODEL)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embed" not in name and "layers.1." not in name)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    expected = plain_losses(model)
    assert expected[-1] < expected[0] - 0.02

    engine = engine_of(layout, optim={"groups": [{"pattern": "embed|layers.1.", "frozen": True}]})
    before = dict(engine.masters())
    rel = 2e-3 if layout.endswith("bf16") else 2e-6
    assert losses(engine, STEPS) == pytest.approx(expected, rel=rel)
    assert {n for n, after in engine.masters() if not after.equal(before[n])} == trained
    assert bytes_of(engine) == pytest.approx(estimated_bytes(engine), rel=0.01)


# Leaf modules of ZeRO 3, the first of which has an input that depends on no trained weight.
LEAVES = {
    "layers": (MODEL, {"compile": True}, "embed"),
    "mixtures": (MIXTURES["mixtral"], {}, "embed|self_attn|norm|lm_head"),
}


@pytest.mark.parametrize("leaves", LEAVES)
@ranks(2)
def test_zero_3_trains_leaf_modules_above_frozen_weights(leaves: str) -> None:
    config, model, frozen = LEAVES[leaves]
    sections: dict[str, Any] = {
        "model": {"name": written(leaves, config), **model},
        "optim": {"groups": [{"pattern": frozen, "frozen": True}]},
    }
    curves = []
    for zero in ("zero1", "zero3"):
        with mock.patch.object(torch, "compile", lambda function: function):  # it takes a minute
            engine = engine_of(zero, **sections)
        curves.append(losses(engine, STEPS))
        engine.close()
    assert curves[1] == pytest.approx(curves[0], rel=2e-6)
    assert curves[0][-1] < curves[0][0] - 0.001
