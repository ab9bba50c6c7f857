"""The command's own build and train, on the default model and data, optionally with shuffled
targets.
"""

from __future__ import annotations

import dataclasses
import json

import numpy as np
from numpy.typing import NDArray

from harness.data.build import build_data
from harness.data.packing import Packed, Windows
from harness.data.spec import DataSpec
from harness.loop import build, train
from harness.plan.command import parse_command, plan_from


def shuffle_targets() -> None:
    """Take targets from another window in another order, so that only their frequencies can be
    learned.
    """
    read = Packed.read

    def shuffled(packed: Packed, windows: NDArray[np.int64]) -> Windows:
        elsewhere = read(packed, (windows * 7919 + 1) % packed.num_windows).labels
        pairs = zip(windows, elsewhere, strict=True)
        rows = [np.random.default_rng(n).permutation(row) for n, row in pairs]
        return dataclasses.replace(read(packed, windows), labels=np.stack(rows))

    Packed.read = shuffled


def main(argv: list[str]) -> int:
    targets, *words = argv
    plan = plan_from(parse_command(words))
    data = build_data(DataSpec.of_run(plan.config, plan.model_config))
    run = build(plan, data=data)
    unigram_nats = data.unigram_nats
    if targets == "shuffled":
        shuffle_targets()
    code = train(run)
    print(json.dumps({"unigram_nats": unigram_nats}))
    return code
