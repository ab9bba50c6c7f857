"""Checks of what waits for what on a device with streams, simulated on two ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from harness.engine.deepspeed_0_19 import settlements
from tests.engine.rank import engine_of, run_checks, share_of, stage
from tools.proofs.streams.simulated import simulated

BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}


def zero(number: int, **keys: Any) -> dict[str, Any]:
    """In bf16, without the timer whose waits hide races from the third step on."""
    section = {**stage(number)["zero_optimization"], **keys}
    return {"zero_optimization": section, **BF16, "timers": {"throughput": {"enabled": False}}}


PINNED = {"device": "cpu", "pin_memory": True}
LION = {"optim": {"name": "lion"}}  # in torch's own operations, which are seen
CLIPPED = {"optim": {"name": "lion", "clip_value": 1e-3}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero1": (zero(1), {}),
    "zero2": (zero(2, overlap_comm=True), {}),
    "zero3": (zero(3), {}),
    "zero3 clipped": (zero(3), CLIPPED),
    "offload1": (zero(1, offload_optimizer=PINNED), LION),
    "offload2": (zero(2, offload_optimizer=PINNED, overlap_comm=False), LION),
    "offload2 clipped": (zero(2, offload_optimizer=PINNED, overlap_comm=False), CLIPPED),
}
UNORDERED = {  # what orders them -> where nothing else does
    "settle_gradients": ("zero2", "offload1", "offload2", "offload2 clipped"),
    "gather_after_writing": ("zero3",),
}


def seen(ds: dict[str, Any], sections: dict[str, Any], synchronizes: bool = True) -> dict[str, Any]:
    """Races and waits in four steps, of which one is judged to be a spike; waits in the last."""
    judged: list[bool] = []

    def judge(share: torch.Tensor, norm: torch.Tensor) -> bool:
        judged.append(len(judged) == 2 or not torch.stack([share, norm]).isfinite().all())
        return judged[-1]

    with simulated(synchronizes) as device:
        engine = engine_of(ds, **sections)
        for number in range(4):
            device.timeline.waits.clear()
            engine.train_batch(*share_of(engine, number), 1e-3, judge)
            if number == 1:
                engine.eval_batch(share_of(engine)[0])
                engine.refresh_weights()
        waits = [place for _, place, _ in device.timeline.waits]
        facts = {"races": dict(device.memory.races), "waits": waits}
        facts["reuses"] = dict(device.memory.reuses)
        engine.close()
    return facts


def streams_wait_for_each_other() -> dict[str, Any]:
    return {name: seen(*case) for name, case in CASES.items()}


def nothing_waits() -> dict[str, Any]:
    """The same without our waits, and without those of DeepSpeed for the whole device."""
    facts = {}
    for mend, names in UNORDERED.items():
        for name in names:
            with mock.patch.object(settlements, mend):
                facts[name] = seen(*CASES[name], synchronizes="offload" in name)
    return facts


CHECKS = (streams_wait_for_each_other, nothing_waits)


def main() -> None:
    run_checks(CHECKS)


if __name__ == "__main__":
    main()
