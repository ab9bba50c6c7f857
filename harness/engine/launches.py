"""Measures how fast this host launches a layer, which decides the time of short steps."""

import statistics
import time
from typing import Any

import torch

from harness.checkpoint.collectives import gather_objects
from harness.engine.processes import own_device
from harness.estimate.hardware import known_gpu
from harness.estimate.step_time.host import keep_launch_ms, kept_launch_ms, launch_file
from harness.layout.world import World

_LAUNCHED = 200  # layers: about half a second


def measure_host(world: World) -> str:
    """Measure the launches of each node's first rank, unless a host like it was measured before,
    and keep them for later plans. Return a sentence about a new measurement. Collective.
    """
    if world.accelerator == "cpu":
        return ""
    measured, gpu = None, known_gpu(world.gpu)
    gather_objects(None)  # the other ranks of the node wait meanwhile, whatever their GPU is
    is_first = world.local_rank == 0 and world.ranks_per_gpu == 1
    if gpu and is_first and kept_launch_ms(gpu.key) is None:
        measured = launch_ms(own_device(world))
    gather_objects(None)
    if gpu is None or measured is None:
        return ""
    keep_launch_ms(gpu.key, measured)
    kept = f"kept for predictions in {launch_file(gpu.key)}; remove it to measure again"
    return f"this host launches a layer in {measured:.2f} ms: {kept}"


def launch_ms(device: torch.device) -> float | None:
    """Return the milliseconds in which the host launches the forward pass of a Llama layer, whose
    kernels are so small that a GPU waits for the host; None if it cannot be measured.
    """
    try:
        return 1e3 * _launch_seconds(device)
    except Exception:  # a run must not end because of a prediction
        return None


def _launch_seconds(device: torch.device) -> float:
    from transformers.models.llama import modeling_llama as llama

    values: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    values["attn_implementation"] = "sdpa"
    config = llama.LlamaConfig.from_dict(values)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        layer = llama.LlamaDecoderLayer(config, 0).to(device, torch.bfloat16)
    hidden = torch.ones(1, 16, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    tokens = torch.arange(16, device=device)[None]
    angles = llama.LlamaRotaryEmbedding(config).to(device)(hidden, tokens)
    seconds = []
    for _ in range(_LAUNCHED):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        layer(hidden, position_embeddings=angles)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
