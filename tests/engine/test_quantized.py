"""Adapters beside weights in 4 bits, against peft and bitsandbytes in a plain loop."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from harness.config.run_config import RunConfig
from harness.engine.empty import empty_model
from harness.engine.reading import PieceReader
from harness.layout.adapters import Adapters, linear_weights
from harness.layout.quantization import Quantization
from harness.layout.shape import Shape
from harness.layout.world import World
from harness.models.initialize import materialize
from harness.models.pieces import pieces
from harness.models.quantized import quantize_linear_maps, round_linear_maps
from harness.models.skeleton import hf_config, skeleton
from harness.plan.make import make_plan
from tests.engine.results import Result, results_of
from tests.engine.small import CONFIGS, MODEL, run_config
from tests.engine.test_adapters import ALL, ALPHA, RANK, base_model, plain_losses, saved_model
from tests.two_ranks import Ended, run_ranks

bitsandbytes = pytest.importorskip("bitsandbytes")

FP32 = ("zero0", "zero1", "zero2", "zero2_offload", "sequence2")
VARIANTS: dict[str, dict[str, Any]] = {
    "fp4": {"kind": "fp4", "doubles": False},
    "targets": {"target_modules": ["q_proj", "v_proj"]},
    "dora": {"use_dora": True},
    "full": {},
    "selective": {},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("quantized"))


@pytest.fixture(scope="module")
def ended(folder: Path) -> Ended:
    return run_ranks([sys.executable, "-m", "tests.engine.quantized_checks", folder], folder)


@pytest.fixture(scope="module")
def result(ended: Ended, folder: Path) -> Result:
    """Return a check's result on each rank."""
    return results_of(ended, folder)


def quantized_by_transformers(base: Path, kind: str, doubles: bool) -> Any:
    """Return the model as others open it: its linear layers in 4 bits, the head as it is."""
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=doubles,
        bnb_4bit_compute_dtype=torch.float32,
    )
    return AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, quantization_config=quantization
    ).train()


def expected_losses(
    base: Path, kind: str = "nf4", doubles: bool = True, **settings: Any
) -> tuple[list[float], Any]:
    """Return losses of peft beside bitsandbytes' weights, and the model that was trained."""
    model = quantized_by_transformers(base, kind, doubles)
    values = {"r": RANK, "lora_alpha": ALPHA, "target_modules": ALL, **settings}
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **values))
    return plain_losses(adapted), adapted


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[list[float], Any]:
    return expected_losses(folder / "base")


@pytest.mark.slow
@pytest.mark.parametrize("layout", FP32)
def test_losses_are_those_of_peft_in_a_plain_loop(
    layout: str, result: Result, folder: Path, plain: tuple[list[float], Any]
) -> None:
    expected, model = plain
    assert expected[-1] < expected[0] - 0.02
    for rank in result("quantized"):
        assert rank[layout]["losses"] == pytest.approx(expected, rel=2e-6)
    saved = load_file(folder / f"quantized-{layout}.safetensors")
    stepped = {n.removeprefix("base_model.model."): p for n, p in model.named_parameters()}
    assert saved.keys() == {name for name in stepped if "lora" in name}
    for name, tensor in saved.items():
        torch.testing.assert_close(tensor, stepped[name].detach(), rtol=1e-3, atol=2e-6)


@pytest.mark.slow
def test_half_precision_stays_near(result: Result, plain: tuple[list[float], Any]) -> None:
    for rank in result("quantized"):
        assert rank["zero1_bf16"]["losses"] == pytest.approx(plain[0], rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_are_those_of_peft(
    variant: str, result: Result, folder: Path, plain: tuple[list[float], Any]
) -> None:
    """The run evaluates after every step, the plain loop never: on CPUs with bf16 instructions
    bitsandbytes packs weights anew as it first evaluates, and their gradients end.
    """
    settings = VARIANTS[variant]
    expected, _ = expected_losses(folder / "base", **settings) if settings else plain
    for rank in result("variants"):
        assert rank[variant] == pytest.approx(expected, rel=2e-6)


@pytest.mark.slow
def test_checkpoints_hold_adapters_alone(result: Result) -> None:
    expected = {tensor.name for tensor in Adapters(RANK).tensors(Shape.from_hf(MODEL))}
    for layout in (*FP32, "zero1_bf16"):
        names = {name for rank in result("quantized") for name in rank[layout]["saved"]}
        assert names == expected


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*FP32, "zero1_bf16"])
def test_bytes_held_are_those_of_the_estimate(layout: str, result: Result) -> None:
    for rank in result("quantized"):
        assert rank[layout]["bytes"] == pytest.approx(rank[layout]["estimated"], rel=0.01)


def floats_alive() -> int:
    """Return the bytes of all floating-point tensors in this process, each storage once."""
    tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    tensors = [x for x in tensors if x.layout == torch.strided]  # others have no storage
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for x in tensors
        if x.is_floating_point() and x.device.type != "meta"
    }
    return sum(storages.values())


def test_weights_are_read_and_quantized_a_piece_at_a_time(tmp_path: Path) -> None:
    config = {**MODEL, "num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 192}
    (tmp_path / "config.json").write_text(json.dumps(config))
    AutoModelForCausalLM.from_config(hf_config(config)).save_pretrained(tmp_path / "base")
    base, lora = str(tmp_path / "base"), {"rank": 4, "quantize": "nf4"}
    model = {"name": base, "init_from": base, "lora": lora}
    run = RunConfig.model_validate(run_config(tmp_path, model=model))
    plan = make_plan(run, {"zero_optimization": {"stage": 1}}, World(0, 1, 0, 1))
    empty = empty_model(plan, trust_remote_code=False)
    whole = 4 * sum(p.numel() for p in empty.parameters())
    largest = 4 * max(sum(p.numel() for *_, p in piece.parameters()) for piece in pieces(empty))
    quantized = {tensor.name for tensor in linear_weights(Shape.from_hf(config))}
    kept = 4 * sum(p.numel() for name, p in empty.named_parameters() if name not in quantized)
    made = quantize_linear_maps(empty, Quantization("nf4"))
    gc.collect()  # else models of above and of other tests go while it is counted
    before, most = floats_alive(), 0

    def counted(name: str, tensor: torch.Tensor) -> torch.nn.Parameter:
        nonlocal most
        parameter = made(name, tensor)  # beside the piece that it is of
        most = max(most, floats_alive() - before)
        return parameter

    read = PieceReader(plan, empty, trust_remote_code=False)
    materialize(empty, 0, torch.device("cpu"), cut=counted, read=read)
    scales = whole // 64
    assert largest < most < 2 * largest + kept + scales
    assert most < whole / 2
    after = floats_alive() - before
    assert after < kept + whole / 16
    reference = quantized_by_transformers(tmp_path / "base", "nf4", True)
    for name, p in reference.named_parameters():
        torch.testing.assert_close(empty.get_parameter(name).data, p.data, rtol=0, atol=0)


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - {"falcon", "mamba", "rwkv"}))
def test_quantized_weights_are_those_that_the_estimate_counts(name: str) -> None:
    try:
        shape = Shape.from_hf(CONFIGS[name])
    except ValueError:
        pytest.skip("its parameters are not counted")
    empty = skeleton(hf_config(CONFIGS[name]), torch.float32, "eager")
    quantize_linear_maps(empty, Quantization("nf4"))
    quantized = {
        f"{name}.weight": module.weight.numel()
        for name, module in empty.named_modules()
        if isinstance(module, bitsandbytes.nn.Linear4bit)
    }
    assert quantized == {tensor.name: tensor.numel for tensor in linear_weights(shape)}


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("doubles", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_rounded_weights_are_what_quantized_ones_compute_with(
    family: str, kind: Any, doubles: bool
) -> None:
    torch.manual_seed(2)
    config = hf_config(CONFIGS[family])
    quantization, ids = Quantization(kind, doubles), torch.arange(24).view(2, 12)
    model = AutoModelForCausalLM.from_config(config).eval()
    empty = skeleton(config, torch.float32).eval()
    own = model.state_dict()
    cut = quantize_linear_maps(empty, quantization)
    materialize(empty, 0, torch.device("cpu"), cut=cut, read=lambda piece: own)
    before = model(input_ids=ids).logits
    round_linear_maps(model, quantization, torch.float32)
    rounded = model(input_ids=ids).logits
    assert (rounded - before).abs().max() > 1e-3
    torch.testing.assert_close(rounded, empty(input_ids=ids).logits, rtol=1e-5, atol=1e-5)


class Dequantized(TorchDispatchMode):
    """Notes the bytes of everything that is dequantized: of a weight its scales, then itself."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if "dequantize" in func.name():
            self.bytes.append(output.nbytes)
        return output


def test_one_weight_at_a_time_is_dequantized_with_the_estimated_bytes() -> None:
    own = base_model().state_dict()
    empty, quantization = skeleton(hf_config(MODEL), torch.float32), Quantization("nf4")
    cut = quantize_linear_maps(empty, quantization)
    materialize(empty, 0, torch.device("cpu"), cut=cut, read=lambda piece: own)
    embedded = empty.get_input_embeddings()(torch.arange(16)[None]).detach().requires_grad_()
    loss = empty(inputs_embeds=embedded).logits.sum()
    with Dequantized() as noted:
        loss.backward()
    sizes = [sum(pair) for pair in zip(noted.bytes[::2], noted.bytes[1::2], strict=True)]
    weights = [tensor.numel for tensor in linear_weights(Shape.from_hf(MODEL))]
    assert sorted(sizes) == sorted(quantization.temporary_bytes(n, 4) for n in weights)
