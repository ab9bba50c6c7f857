"""The kinds of inputs, and how many of each there are in 1,500."""

from __future__ import annotations

from tests.fuzz.case import Kind
from tests.fuzz.kinds import (
    arguments,
    caches,
    checkpoints,
    configs,
    corpora,
    exports,
    jsons,
    models,
    pickles,
    preparing,
    runs,
    tokenizers,
    weights,
    words,
)

KINDS = {
    kind.name: kind
    for kind in (
        Kind("config", 150, configs.make),
        Kind("words", 150, words.make),
        Kind("json", 170, jsons.make),
        Kind("model", 140, models.make),
        Kind("weights", 100, weights.make),
        Kind("data", 170, corpora.make),
        Kind("tokenizer", 80, tokenizers.make),
        Kind("cache", 40, caches.make),
        Kind("run", 110, runs.make, refused=0.05),
        Kind("checkpoint", 110, checkpoints.make),
        Kind("pickle", 80, pickles.make),
        Kind("export", 40, exports.make),
        Kind("arguments", 60, arguments.make),
        Kind("preparing", 100, preparing.make),
    )
}
