"""Words of train.py's command line: key=value, ds.key=value, options."""

from __future__ import annotations

import random

from harness.config.run_config import known_keys
from tests.fuzz.case import Case, Place
from tests.fuzz.kinds.configs import valid_tree
from tests.fuzz.values import hostile, to_toml

_WORD_LIMIT = 100_000  # bytes; the system takes 128 KiB

_DS_KEYS = (
    *("ds.zero_optimization.stage", "ds.zero_optimization.reduce_bucket_size", "ds.bf16.enabled"),
    *("ds.fp16.enabled", "ds.gradient_clipping", "ds.train_batch_size", "ds.optimizer.type"),
    *("ds.gradient_accumulation_steps", "ds.pipeline.stages", "ds.optimizer.params.lr"),
    *("ds.zero_optimization.offload_optimizer.device", "ds.zero_optimization", "ds.scheduler"),
    *("ds.tensor_parallel.autotp_size", "ds.sequence_parallel_size", "ds.compile.backend"),
)
_WORDS = (
    *("", "=", "==", "a", "a=", "=a", ".=1", "train.=1", ".steps=1", "train..steps=1", "train=1"),
    *("train={}", "train=[]", "train={steps=1}", "ds=1", "ds.=1", "ds", "ds.a..b=1", "ds={}"),
    *("train.steps", "train.steps=", "train.steps =1", " train.steps=1", "train.steps==1"),
    *(
        "train.steps=1\ntrain.seed=2",
        'data.path="a',
        "optim.betas=0.9,0.95",
        "train.steps=1979-05-27",
    ),
    *("model.overrides=1", "model.overrides.=1", "model.overrides.a.b.c=1", "train.steps.x=1"),
    *("--deepspeed", "--config", "--deepspeed=", "--config=", "--deepspeed=nowhere.json", "--keys"),
    *("--config=nowhere.toml", "--local_rank", "--local_rank=x", "--local-rank=99999999999"),
    *("--", "-", "---", "-h", "--help", "-x", "--seq-len=3", "--num_gpus=2", "@file", "--dry"),
    *("run.dir=/dev/null", "run.dir=/dev/null/x", "run.dir=/proc/nowhere", "run.dir=" + "a" * 300),
    *(
        "run.dir=" + "a/" * 3000,
        "data.path=" + "b" * 300,
        "model.name=" + "c" * 5000,
        "run.dir=~x/y",
    ),
    *(
        "run.dir=a\tb",
        "data.path=~nosuchuser/x",
        "model.name=~nosuchuser/x",
        "resume.from=~nobody_/x",
    ),
    *(
        "data.cache_dir=~nosuchuser",
        "model.init_from=~nosuchuser/m",
        "resume.from=@",
        "resume.from=@1",
    ),
    *("resume.from=x@99999999999", "model.name=a/b/c/d", "model.name=http://x", "model.name=.."),
    *("train.global_batch=1000000000", "train.global_batch=16777216", "data.prefetch=99999999"),
    *("data.seq_len=1000000000", "train.tokens=999999999999999999", "train.epochs=1e300"),
    *("model.overrides.num_hidden_layers=100000000", "model.overrides.vocab_size=99999999999"),
    *("model.overrides.hidden_size=0", "model.overrides.num_attention_heads=0", "train.steps=0"),
    *(
        "guard.spike_window=9223372036854775808",
        "optim.groups=[{pattern='('}]",
        "optim.cycles=10**9",
    ),
    *("ds.pipeline.stages=1000000", "ds.pipeline.partition=[1]", "ds.pipeline.partition=[[]]"),
    *("resume.allow=", "resume.allow=[1]", "resume.allow=a b;c", "profile.steps=5:1"),
    *("\udcff\udcfe=1", "run.dir=\udcff", "model.name=\udce9t\udce9", "\ud800=1", "train.\u0435=1"),
    "optim.cycles=1000000000",
)


def make(draw: random.Random, _: Place, valid: bool) -> Case:
    """A dry run with a few good words and, unless it is valid, one or two others."""
    tree = valid_tree(draw)
    words = [
        f"{section}.{key}={to_toml(value)}"
        for section, values in tree.items()
        for key, value in values.items()
    ]
    if valid:
        return Case([*words, "--dry-run"], "valid", valid=True)
    spoiled = [spoiled_word(draw) for _ in range(draw.choice((1, 1, 2)))]
    for word in spoiled:
        words.insert(draw.randrange(len(words) + 1), word)
    if not any(word.startswith("--config") for word in words):
        words.append("--dry-run")
    else:  # an option that takes a word may stand before it
        words.insert(0, "--dry-run")
    return Case(words, " ".join(map(ascii, spoiled))[:150])


def spoiled_word(draw: random.Random) -> str:
    """One word of a command line that train.py may not understand."""
    way = draw.randrange(4)
    if way == 0:
        return draw.choice(_WORDS)
    key = draw.choice([*known_keys(), *_DS_KEYS])
    if way == 1:
        key = draw.choice([key[:-1], key.upper(), f"{key}.x", key.partition(".")[0], f"ds.{key}"])
    word = f"{key}={to_toml(hostile(draw))}"
    return word.replace("\0", "")[:_WORD_LIMIT]
