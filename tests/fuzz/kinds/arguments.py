"""Arguments of the tools."""

from __future__ import annotations

import random

from tests.fuzz.case import Case, Place
from tests.fuzz.kinds.words import spoiled_word
from tests.fuzz.values import NUMBERS, TEXTS

_PLANNING = {
    "--model": ["tiny", "llama-3-8b", "gpt2-124m", "mixtral-8x7b", "qwen3-30b-a3b"],
    "--gpus": ["1", "8", "64"],
    "--gpus-per-node": ["4", "8"],
    "--gpu": ["h100-80", "a100-40"],
    "--micro-batch": ["1", "2"],
    "--seq-len": ["128", "1024"],
    "--accumulation": ["1", "4"],
    "--checkpointing": ["none", "full", "selective", "2"],
    "--deepspeed": ["zero1.json", "zero2.json", "zero3.json", "zero3_offload.json", "fp16.json"],
}
_JSON = "zero1.json"
# Of each tool: valid arguments, those that may follow, and those that are wrong.
_TOOLS: dict[str, tuple[list[list[str]], list[str]]] = {
    "tools.estimate_memory": (
        [["--json"], ["--accounting", "paper"], ["--sweep", "micro_batch=1..4"], []],
        ["--sweep=micro_batch=9..1", "--sweep=x=1..2", "--sweep=gpus=0..8", "--sweep=gpus=1..",
         "--sweep=seq_len=1..99999999999999", "--accounting=x", "--plot=a.txt", "--plot=",
         "--plot=/dev/null/x.svg", "--sweep", "--plot=nowhere/x.svg",
         "--sweep=micro_batch=1..10000000"],
    ),
    "tools.show_layout": ([[]], ["--plot=x.svg", "--plot=x", "--measure=1", "--json"]),
}  # fmt: skip
_SCHEDULES = (
    *(
        ["--steps", "10"],
        ["--steps", "0"],
        ["--steps", "-1"],
        ["--steps", "x"],
        ["--steps", "9" * 20],
    ),
    *(
        ["train.epochs=2"],
        ["train.epochs=2", "--steps", "5"],
        ["--plot", "x.svg"],
        ["--plot", "x.gif"],
    ),
    *(
        ["train.steps=100000000"],
        ["ramp.batch_from=8", "ramp.batch_tokens=100000"],
        ["train.steps=0"],
    ),
)
# Those that would start work of hours end at their arguments here.
_REFUSED = {
    "tools.proofs.check_parity": ("--cells x", "--cells", "--bogus", "x"),
    "tools.proofs.check_checkpoints": ("--cells x", "--bogus", "--cells \udcff"),
    "tools.proofs.measure_memory": ("--cells x", "--bogus", "--out"),
    "tools.rehearse": ("--gpus x", "--gpus 0", "--ranks 0", "--bogus", "--ranks"),
    "tools.find_lr": ("--from 1 --to 0", "--from x", "--steps -1", "--plot x", "optim.lr=-1"),
    "tools.preflight": ("--bogus", "--deepspeed", "optim.lr=-1", "x"),
    "tools.show_batch": ("nowhere --step 1", ".", ". --step 0", ". --step x"),
    "tools.export_hf": ("nowhere", "", ".", ". --step x", "\udcff", "secret.txt"),
    "tools.import_checkpoint": ("nowhere --out x", "", ".", ". --out x"),
}


def make(draw: random.Random, place: Place, valid: bool) -> Case:
    """A tool that plans, with good and bad arguments; other tools with bad ones."""
    way = draw.randrange(8)
    if way == 7 and not valid:
        main = draw.choice([*_REFUSED])
        place.secret()
        words = draw.choice(_REFUSED[main]).split()
        return Case(words, f"{main} {' '.join(words)}", main=main)
    if way == 6:
        words = _SCHEDULES[0] if valid else draw.choice(_SCHEDULES)
        if not valid and draw.randrange(2):
            words = [*words, spoiled_word(draw)]
        note = f"plot_schedule {ascii(' '.join(words))[:120]}"
        return Case(words, note, main="tools.plot_schedule", valid=valid)
    return _planned(draw, valid)


def _planned(draw: random.Random, valid: bool) -> Case:
    main = draw.choice([*_TOOLS])
    endings, wrong = _TOOLS[main]
    flags = {flag: draw.choice(values) for flag, values in _PLANNING.items() if draw.randrange(2)}
    flags.setdefault("--deepspeed", _JSON)
    note, more = "valid", []
    if not valid:
        way = draw.randrange(4)
        if way == 0:
            flag = draw.choice([*_PLANNING])
            value = draw.choice((str(draw.choice(NUMBERS)), draw.choice(TEXTS)))
            flags[flag] = value.replace("\0", "")[:100_000]
            note = f"{flag} {ascii(value)[:80]}"
        elif way == 1:
            more = [draw.choice(wrong)]
        elif way == 2:
            more = [spoiled_word(draw)]
        else:
            more = [draw.choice((*_PLANNING, "--bogus", "--gpus=", "--local_rank=1"))]
        note = f"{note}, {ascii(' '.join(more))[:100]}"
    words = [f"{flag}={value}" for flag, value in flags.items()]
    words = [_with_folder(word) for word in words] + more + draw.choice(endings)
    return Case(words, f"{main}: {note}", main=main, valid=valid)


def _with_folder(word: str) -> str:
    from tests.two_ranks import REPOSITORY

    flag, _, value = word.partition("=")
    shipped = REPOSITORY / "ds_configs" / value
    is_name = flag == "--deepspeed" and value.endswith(".json") and "/" not in value
    return f"{flag}={shipped}" if is_name else word
