"""harness/train.py, in which steps go wrong: `python -m tests.spoiled_run SPOILS ARGUMENTS...`.

SPOILS is JSON: {"loss": {first sample of a step: factor of its loss, on the last rank alone}},
{"flip": step after which the last rank's last weight has one bit flipped}, and
{"ruin": step after which that weight is no number}.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

import torch

from harness import train
from harness.watch import Watch


def main() -> int:
    spoils: dict[str, Any] = {"loss": {}, "flip": None, "ruin": None, **json.loads(sys.argv[1])}
    train_batch = Watch.train_batch

    def spoiled(watch: Watch, *arguments: Any) -> Any:
        from harness.engine import zero

        run = watch.run
        last = run.plan.world.rank == run.plan.world.world_size - 1
        factor = float(spoils["loss"].get(str(run.state.samples), 1.0)) if last else 1.0
        forward = zero.forward

        def scaled(*tensors: Any) -> Any:
            loss, auxiliary = forward(*tensors)
            return loss * factor, auxiliary

        with mock.patch.object(zero, "forward", scaled):
            result = train_batch(watch, *arguments)
        if last and run.state.step + 1 == spoils["flip"]:
            *_, (_, weight) = run.engine.replicated()
            weight.view(-1).view(torch.int32)[-1] ^= 1
        if run.state.step + 1 == spoils["ruin"]:
            *_, (_, weight) = run.engine.replicated()
            weight.fill_(float("nan"))
        return result

    with mock.patch.object(Watch, "train_batch", spoiled):
        return train.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
