"""Measures how fast this host launches a layer, which decides the time of short steps."""

import statistics
import time

import torch

from harness.engine.processes import own_device
from harness.estimate.step_time.host import keep_launch_ms, kept_launch_ms
from harness.layout.world import World

_LAUNCHED = 200  # layers: about half a second


def measure_host(world: World) -> None:
    """Measure this host's launches once, on its first rank, and keep them for later plans."""
    alone = world.accelerator == "cuda" and world.ranks_per_gpu == 1
    if alone and world.local_rank == 0 and kept_launch_ms() is None:
        keep_launch_ms(1e3 * launch_seconds(own_device(world)))


def launch_seconds(device: torch.device) -> float:
    """Return the host's seconds to launch the forward pass of a Llama layer, whose kernels are so
    small that a GPU waits for the host.
    """
    from transformers.models.llama import modeling_llama as llama

    config = llama.LlamaConfig(hidden_size=64, intermediate_size=128, num_attention_heads=2)
    config._attn_implementation = "sdpa"
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        layer = llama.LlamaDecoderLayer(config, 0).to(device, torch.bfloat16)
    hidden = torch.ones(1, 16, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    tokens = torch.arange(16, device=device)[None]
    places = llama.LlamaRotaryEmbedding(config).to(device)(hidden, tokens)
    seconds = []
    for _ in range(_LAUNCHED):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        layer(hidden, position_embeddings=places)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
