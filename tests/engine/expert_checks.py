"""Checks of divided experts on two ranks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

from harness.engine.deepspeed_0_19 import experts as told
from harness.models.skeleton import hf_config
from tests.engine.rank import OUT, WORLD, engine_of, run_checks, save, share_of, stage
from tests.engine.small import EAGER, MIXTURES

MIXTRAL = "mixtral"
Gradients = dict[str, torch.Tensor]


def experts(zero: int = 1, **keys: Any) -> dict[str, Any]:
    ds = stage(zero)
    ds["zero_optimization"] |= keys
    return {**ds, "expert_parallel": {"enabled": True, "autoep_size": 2}}


def mixture(ds: dict[str, Any], family: str = MIXTRAL, **model: Any) -> Any:
    path = OUT / f"{family}.{WORLD.rank}.json"
    path.write_text(json.dumps(MIXTURES[family]))
    attention = {"attention": "eager"} if family in EAGER else {}
    return engine_of(ds, model={"name": str(path), **attention, **model})


def gradients(engine: Any) -> Gradients:
    engine.accumulate(*share_of(engine))
    return dict(engine.gradients())


def apart(own: Gradients, whole: Gradients) -> float:
    """The largest distance of a parameter's gradient, relative to the largest of its elements."""
    assert own.keys() == whole.keys()
    return max(
        float((own[name] - whole[name]).abs().max() / whole[name].abs().max().clamp(min=1e-30))
        for name in whole
    )


def expert_families() -> dict[str, float]:
    distances = {}
    for family in MIXTURES:
        both = []
        for ds in (experts(), stage(1)):
            both.append(gradients(engine := mixture(ds, family)))
            engine.close()
        distances[family] = apart(*both)
    return distances


def expert_layouts() -> dict[str, float]:
    """Of a Mixtral in other ways than plain ZeRO 1."""
    offloaded = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
    ways: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "zero2": (experts(2), {}),
        "zero3": (experts(3), {}),
        "zero3, recomputed": (experts(3), {"checkpointing": "full"}),
        "zero2, offloaded": (experts(2, **offloaded), {}),
        "zero3, offloaded": (experts(3, **offloaded), {}),
    }
    whole = gradients(engine := mixture(stage(1)))
    engine.close()
    distances = {}
    for name, (ds, model) in ways.items():
        distances[name] = apart(gradients(engine := mixture(ds, **model)), whole)
        engine.close()
    return distances


@contextlib.contextmanager
def all_to_the_first(engine: Any) -> Iterator[None]:
    """All tokens go to the first experts, which are rank 0's; experts without any do nothing."""
    engine.module.config._experts_implementation = "eager"
    with contextlib.ExitStack() as stack:
        for name, module in engine.module.named_modules():
            if name.endswith(".experts"):
                stack.enter_context(mock.patch.object(module, "forward", _first(module.forward)))
        yield


def _first(forward: Any) -> Any:
    def to_the_first(states: Any, index: torch.Tensor, weights: Any) -> Any:
        return forward(states, torch.arange(index.shape[1]).expand_as(index), weights)

    return to_the_first


def a_rank_without_tokens() -> dict[str, Any]:
    results: dict[str, Any] = {}
    with all_to_the_first(whole := mixture(stage(1))):
        expected = gradients(whole)
    whole.close()
    for zero in (1, 2, 3):
        with all_to_the_first(engine := mixture(experts(zero))):
            results[f"zero{zero}"] = apart(gradients(engine), expected)
            engine.apply(1e-3)
        tokens = engine.expert_tokens()
        results["last experts"] = int(tokens[:, 2:].sum())
        engine.close()
    return results


def expert_norms() -> dict[str, float]:
    """DeepSpeed's norm over that of all gradients, each element once."""
    bf16 = {"bf16": {"enabled": True}}
    sums = {"data_types": {"grad_accum_dtype": "fp32"}}
    ways = {f"zero{zero}": experts(zero) for zero in (1, 2, 3)}
    ways |= {"BF16_Optimizer": {**experts(1), **bf16, **sums}}
    ratios = {}
    for name, ds in ways.items():
        engine = mixture(ds)
        engine.accumulate(*share_of(engine))
        norm = engine.grad_norm()
        ratios[name] = float(engine.apply(1e-3)) / float(norm)
        assert name in ("BF16_Optimizer", f"zero{engine.plan.zero_stage}")
        engine.close()
    return ratios


def expert_weights() -> dict[int, Any]:
    """Save each stage's initial weights; return their sizes, in all and here."""
    sizes = {}
    for zero in (1, 2, 3):
        engine = mixture(experts(zero))
        save(f"expert-initial-{zero}", engine.masters())
        parts = [(name, p.part) for name, p in engine.module.named_parameters()]
        divided = {name: [part.shape[0], part.whole[0]] for name, part in parts if ".exp" in name}
        undivided = sum(part.numel for _, part in parts if part.is_whole)
        experts_here = sum(part.numel for _, part in parts if not part.is_whole)
        numels = {"undivided": undivided, "experts": experts_here}
        sizes[zero] = {**engine.describe(), **numels, "divided": divided}
        engine.close()
    return sizes


def expert_given_weights() -> dict[str, bool]:
    """Return True if the stages have the weights that transformers wrote, expert by expert."""
    folder = OUT / "given_mixture"
    written = AutoModelForCausalLM.from_config(hf_config(MIXTURES[MIXTRAL]))
    if WORLD.rank == 0:
        written.save_pretrained(folder)
    for parameter in written.parameters():
        dist.broadcast(parameter.data, 0)
    are_equal = {}
    for zero in (1, 3):
        engine = engine_of(experts(zero), model={"name": str(folder), "init_from": str(folder)})
        masters = dict(engine.masters())
        expected = dict(written.named_parameters())
        are_equal[f"zero{zero}"] = masters.keys() == expected.keys() and all(
            torch.equal(masters[name], weight.detach()) for name, weight in expected.items()
        )
        engine.close()
    return are_equal


def expert_evaluation() -> dict[str, Any]:
    """The largest distance from the undivided model's: logits, and an evaluation's sums."""
    ids = torch.arange(5)[None] + 3
    outputs, counts = [], []
    for ds in (stage(1), experts()):
        engine = mixture(ds)
        sums = engine.sum_over_ranks(engine.eval_batch(share_of(engine)[0]))
        outputs.append((engine.next_token_logits(ids), sums))
        counts.append(engine.expert_tokens())
        engine.close()
    (logits, sums), (divided, divided_sums) = outputs
    return {
        "logits": float((logits - divided).abs().max()),
        "sums": float((sums - divided_sums).abs().max()),
        "undivided tokens": counts[0],
        "tokens": int(counts[1].sum()),
    }


def expert_counts() -> dict[str, Any]:
    """Exchanges between the ranks of one step, and the tokens that experts were sent in it."""
    engine = mixture(experts())
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange:
        batches, targets = share_of(engine)
        engine.accumulate(batches, targets)
    tokens = engine.expert_tokens()
    config = engine.module.config
    engine.close()
    return {
        "micro_batches": len(batches),
        "layers": config.num_hidden_layers,
        "chosen": config.num_experts_per_tok,
        "batch_tokens": sum(batch.input_ids.numel() for batch in batches),
        "tokens": tokens.tolist(),
        "calls": exchange.call_count,
    }


def deepspeed_without_the_marker() -> str | None:
    with mock.patch.object(told, "Marker", nn.Identity):
        try:
            gradients(mixture(experts()))
        except TypeError as error:
            return str(error)
    return None


CHECKS = (
    expert_families,
    expert_layouts,
    a_rank_without_tokens,
    expert_norms,
    expert_weights,
    expert_given_weights,
    expert_evaluation,
    expert_counts,
    deepspeed_without_the_marker,
)


def main() -> None:
    run_checks(CHECKS)


if __name__ == "__main__":
    main()
