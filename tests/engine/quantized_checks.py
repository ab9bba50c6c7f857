"""Checks of adapters beside weights in 4 bits on two ranks.

`python -m tests.engine.quantized_checks OUT` under two ranks writes OUT/NAME.RANK.json and
OUT/NAME.safetensors, which test_quantized.py reads.
"""

from __future__ import annotations

from typing import Any

from tests.engine.adapter_checks import LAYOUTS, LORA, STEPS, adapted, bytes_of, estimated
from tests.engine.rank import losses, run_checks, save, share_of, stage

QLORA = {**LORA, "quantize": "nf4"}
NAMES = ("zero0", "zero1", "zero2", "zero2_offload", "sequence2", "zero1_bf16")
VARIANTS: dict[str, dict[str, Any]] = {
    "fp4": {"lora": {**QLORA, "quantize": "fp4", "double_quantize": False}},
    "targets": {"lora": {**QLORA, "targets": ["q_proj", "v_proj"]}},
    "dora": {"lora": {**QLORA, "dora": True}},
    "full": {"lora": QLORA, "checkpointing": "full"},
    "selective": {"lora": QLORA, "checkpointing": "selective"},
}


def quantized() -> dict[str, Any]:
    """Losses by layout, what the ranks hold and what they save."""
    results = {}
    for name in NAMES:
        engine = adapted(LAYOUTS[name], QLORA)
        results[name] = {
            "losses": losses(engine, STEPS),
            "saved": sorted({fragment.name for fragment in engine.fragments()}),
            "bytes": bytes_of(engine),
            "estimated": estimated(engine),
        }
        save(f"quantized-{name}", (pair for pair in engine.masters() if "lora" in pair[0]))
        engine.close()
    return results


def variants() -> dict[str, list[float]]:
    """Losses under ZeRO 2, an evaluation after each step."""
    results = {}
    for name, settings in VARIANTS.items():
        engine = adapted(stage(2), **settings)
        results[name] = []
        for _ in range(STEPS):
            results[name] += losses(engine, 1)
            engine.eval_batch(share_of(engine)[0])
        engine.close()
    return results


CHECKS = (quantized, variants)


def main() -> None:
    run_checks(CHECKS)


if __name__ == "__main__":
    main()
