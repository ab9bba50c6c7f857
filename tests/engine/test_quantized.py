"""Weights in 4 bits and 8-bit moments, compared with bitsandbytes; in engines: test_adapters.py."""

import gc
import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from harness.config.run_config import RunConfig
from harness.engine import eight_bit
from harness.engine.eight_bit import BLOCK, blank, per_block, per_element
from harness.engine.meta_model import empty_model
from harness.engine.reading import PieceReader
from harness.layout.adapters import Quantization, linear_weights
from harness.layout.shape import Shape
from harness.layout.world import World
from harness.models.adapters import quantize_linear_maps, round_linear_maps
from harness.models.initialize import materialize
from harness.models.skeleton import hf_config, skeleton
from harness.models.units import units
from harness.plan.make import make_plan
from tests.engine.small import CONFIGS, MODEL, run_config
from tests.engine.test_adapters import base_model, quantized_by_transformers

bitsandbytes = pytest.importorskip("bitsandbytes")


def floats_alive() -> int:
    """Return the bytes of all floating-point tensors that are not frozen, each storage once."""
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
    largest = 4 * max(sum(p.numel() for *_, p in piece.parameters()) for piece in units(empty))
    quantized = {tensor.name for tensor in linear_weights(Shape.from_hf(config))}
    kept = 4 * sum(p.numel() for name, p in empty.named_parameters() if name not in quantized)
    made = quantize_linear_maps(empty, Quantization("nf4"))
    gc.collect()  # otherwise earlier models would be freed during the count
    gc.freeze()  # existing objects are not scanned for each weight
    before, most = floats_alive(), 0

    def counted(name: str, tensor: torch.Tensor) -> torch.nn.Parameter:
        nonlocal most
        parameter = made(name, tensor)  # in addition to its piece
        most = max(most, floats_alive() - before)
        return parameter

    read = PieceReader(plan, empty, trust_remote_code=False)
    materialize(empty, 0, torch.device("cpu"), cut=counted, read=read)
    scales = whole // 64
    assert largest < most < 2 * largest + kept + scales
    assert most < whole / 2
    after = floats_alive() - before
    gc.unfreeze()
    assert after < kept + whole / 16
    reference = quantized_by_transformers(tmp_path / "base")
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
def test_quantized_weights_compute_as_rounded_ones(family: str, kind: Any, doubles: bool) -> None:
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
    """Records the bytes of everything that is dequantized: a weight's scales, then the weight."""

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


def test_dequantization_holds_one_weight_at_a_time() -> None:
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


PADDED, NUMEL = 2 * BLOCK, 2 * BLOCK - 12  # the end of a rank's last shard is padding


def stepped() -> tuple[torch.optim.Optimizer, torch.nn.Parameter]:
    torch.manual_seed(0)
    flat = torch.nn.Parameter(torch.randn(PADDED))
    optimizer = bitsandbytes.optim.AdamW8bit([flat], min_8bit_size=1)
    for _ in range(3):
        flat.grad = torch.randn(PADDED)
        flat.grad[NUMEL:] = 0
        optimizer.step()
    return optimizer, flat


def test_adam8bit_steps_oversized_tensors_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eight_bit, "SLICE", 2 * BLOCK)
    monkeypatch.setattr(eight_bit, "_READ_AT_ONCE", 2 * BLOCK)
    weights = []
    settings = {"lr": 1e-2, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1}
    for make in (partial(bitsandbytes.optim.AdamW8bit, min_8bit_size=1), eight_bit.adam8bit):
        torch.manual_seed(0)
        flat = torch.nn.Parameter(torch.randn(5 * BLOCK + 7))
        optimizer = make([flat], **settings)
        assert eight_bit.is_eight_bit(optimizer)
        for _ in range(3):
            flat.grad = torch.randn(flat.shape)
            optimizer.step()
        weights.append(flat.data)
        blocks = per_block(optimizer, filled_from(flat, optimizer))
        assert all(torch.equal(blocks[k], optimizer.state[flat][k]) for k in ("state1", "absmax2"))
    assert torch.equal(*weights)


def filled_from(
    flat: torch.nn.Parameter, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Return the optimizer's states as a checkpoint would fill them."""
    filled = blank(flat)
    for key, values in per_element(optimizer.state[flat]).items():
        filled[key].copy_(values)
    return filled


def test_quantized_blocks_round_trip_without_padding() -> None:
    optimizer, flat = stepped()
    state = optimizer.state[flat]
    filled = blank(flat)
    for key, values in per_element(state).items():
        filled[key][:NUMEL] = values[:NUMEL]  # as in a checkpoint
    blocks = per_block(optimizer, filled)
    for key in ("state1", "state2", "absmax1", "absmax2"):
        kept = NUMEL if key.startswith("state") else None
        assert torch.equal(blocks[key][:kept], state[key][:kept]), key


def test_other_blocks_are_quantised_anew() -> None:
    optimizer, flat = stepped()
    state = optimizer.state[flat]
    moved = {key: values.roll(100) for key, values in per_element(state).items()}
    requantised = per_element(per_block(optimizer, {k: v.clone() for k, v in moved.items()}))
    for codes, scales, table in (("state1", "absmax1", "qmap1"), ("state2", "absmax2", "qmap2")):
        before = state[table][moved[codes].long()] * moved[scales]
        after = state[table][requantised[codes].long()] * requantised[scales]
        assert not torch.equal(requantised[scales], moved[scales])
        assert float((after - before).abs().max()) < 0.02 * float(before.abs().max())


def test_a_kernel_that_nothing_needs_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning of bitsandbytes, as peft imports it, appeared in every training of adapters."""
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    quantize_linear_maps(skeleton(hf_config(MODEL), torch.float32), Quantization("nf4"))
    assert logger.level == logging.ERROR
