"""Invalid run configs, words, DeepSpeed JSONs, models and arguments, most of them in this
process.
"""

from __future__ import annotations

import contextlib
import json
import tomllib
from copy import deepcopy
from pathlib import Path
from typing import Any, NoReturn, cast

import huggingface_hub.constants
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from harness.config.run_config import known_keys
from harness.errors import ConfigError
from harness.files.chat import Chat
from harness.files.forms import read
from harness.files.pieces import Ids
from harness.plan.command import parse_command, plan_from
from harness.plan.memory import Untraceable
from tests.inputs.rule import MANY, SMALL_BUCKET, Case, Inputs, Place, each, remove
from tests.inputs.values import (
    HOSTILE,
    NUMBERS,
    TEXTS,
    Draw,
    changed,
    damaged,
    encoded,
    pick,
    replace_file,
    to_json,
    to_toml,
    toml_document,
    write_json,
)
from tests.real_runs import REPOSITORY
from tests.shipped import ADAMW, FP16, WARMUP, ZERO_3

# Values that every key accepts, alone and combined.
_VALID: dict[str, dict[str, list[Any]]] = tomllib.loads("""
model.name = ["tiny", "llama-1b", "gpt2-124m", "mixtral-8x7b"]
model.checkpointing = ["none", "full", "selective", 2]
model.attention = ["sdpa", "eager"]
model.dropout = [0.0, 0.1]
model.overrides = [{}, {num_hidden_layers = 2}, {initializer_range = 0.01}]
data = {seq_len = [64, 128], held_out = [0.02, 0.1], prefetch = [0, 2]}
train = {steps = [0, 1, 300], global_batch = [8, 48], micro_batch = [2, 4], seed = [0, 17]}
optim.name = ["adamw", "lion", "muon", "adagrad", "sgd"]
optim.lr = [1e-3, 3e-4]
optim.groups = [[], [{pattern = "embed|wte", lr_multiplier = 0.5}]]
optim.schedule = ["cosine", "linear", "wsd", "polynomial", "cosine_restarts", "inverse_sqrt"]
optim.warmup_steps = [0, 20]
eval = {every = [0, 50], samples = [8, 96]}
save = {every = [0, 100], keep = [1, 3], async = [false, true]}
sample = {tokens = [0, 48], prompt = ["def main"]}
guard = {max_bad_steps = [10], spikes = ["log", "skip"], spike_window = [32, 128]}
run.dir = ["runs/first"]
resume.allow = [[], ["optim.lr"]]
""")
_DS_KEYS = (
    *("ds.zero_optimization.stage", "ds.zero_optimization.reduce_bucket_size", "ds.bf16.enabled"),
    *("ds.fp16.enabled", "ds.gradient_clipping", "ds.train_batch_size", "ds.optimizer.type"),
    *("ds.gradient_accumulation_steps", "ds.pipeline.stages", "ds.optimizer.params.lr"),
    *("ds.zero_optimization.offload_optimizer.device", "ds.zero_optimization", "ds.scheduler"),
    *("ds.tensor_parallel.autotp_size", "ds.sequence_parallel_size", "ds.compile.backend"),
)
_PATH_KEYS = ("run.dir", "data.path", "data.cache_dir", "data.tokenizer", "model.name",
              "model.init_from", "resume.from")  # fmt: skip
_PATHS = ("/dev/null", "/dev/null/x", "/proc/nowhere", "a" * 300, "a/" * 3000, "~nosuchuser/x",
          "a\tb", "\udcff", "\udce9t", "@", "@1", "x@99999999999", "http://x", "..")  # fmt: skip
# fmt: off
_WORDS = (
    "", "=", "==", "a", "a=", "=a", ".=1", "train.=1", ".steps=1", "train..steps=1", "train=1",
    "train={}", "train=[]", "train={steps=1}", "ds=1", "ds.=1", "ds", "ds.a..b=1", "ds={}",
    "train.steps", "train.steps=", "train.steps =1", " train.steps=1", "train.steps==1",
    "train.steps=1\ntrain.seed=2", 'data.path="a', "optim.betas=0.9,0.95",
    "train.steps=1979-05-27", "model.overrides=1", "model.overrides.=1",
    "model.overrides.a.b.c=1", "train.steps.x=1", "--deepspeed", "--config", "--deepspeed=",
    "--config=", "--deepspeed=nowhere.json", "--keys", "--config=nowhere.toml", "--local_rank",
    "--local_rank=x", "--local-rank=99999999999", "--", "-", "---", "-h", "--help", "-x",
    "--seq-len=3", "--num_gpus=2", "@file", "--dry", "\ud800=1", "train.\u0435=1",
    "train.global_batch=1000000000", "train.global_batch=16777216", "data.seq_len=1000000000",
    "train.tokens=999999999999999999", "train.epochs=1e300", "train.steps=100000000",
    "model.overrides.num_hidden_layers=100000000", "model.overrides.vocab_size=99999999999",
    "model.overrides.hidden_size=0", "model.overrides.num_attention_heads=0",
    "guard.spike_window=9223372036854775808", "optim.groups=[{pattern='('}]",
    "optim.cycles=1000000000", "ds.pipeline.stages=1000000", "ds.pipeline.partition=[[]]",
    "resume.allow=[1]", "profile.steps=5:1", "ds." + ".".join(["a"] * 3000) + "=1",
)
_AUTO = {"gradient_clipping": "auto", "train_batch_size": "auto"}
_ADAM = {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8}}
_JSONS: dict[str, Any] = {
    "the Trainer's": {"fp16": FP16, "optimizer": ADAMW, "scheduler": WARMUP, **_AUTO,
                      "zero_optimization": {"stage": 2, "overlap_comm": True}},
    "the Trainer's, ZeRO 3": {"bf16": {"enabled": "auto"}, "zero_optimization": ZERO_3, **_AUTO},
    "literals": {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "optimizer": _ADAM,
                 "zero_optimization": {"stage": 1}, "flops_profiler": {"enabled": False}},
    "nothing": {},
    **{path.stem: json.loads(path.read_text()) for path in REPOSITORY.glob("ds_configs/*.json")},
}
# Settings that compile, need more than one rank, or write to other places.
_DEAR = ("offload", "pipeline", "monitor", "tensorboard", "wandb", "comet", "nvme", "aio", "fp16",
         "tensor_parallel", "sequence_parallel")
_SMALL: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu",
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "initializer_range": 0.02, "tie_word_embeddings": False, "attention_dropout": 0.0,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}
_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64}
_MODELS: dict[str, dict[str, Any]] = {
    "llama": {**_SMALL, "mlp_bias": False, "rope_scaling": _ROPE},
    "qwen3": {**_SMALL, "use_sliding_window": False, "layer_types": ["full_attention"] * 2},
    "mixtral": {**_SMALL, "num_local_experts": 4, "num_experts_per_tok": 2,
                "output_router_logits": True, "router_aux_loss_coef": 0.02},
    "gpt2": {"vocab_size": 512, "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4,
             "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "resid_pdrop": 0.1,
             "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2},
}
# fmt: on
# Families outside families.toml: a plan traces them in another process, which takes seconds.
_TRACED = {
    "xlstm": {"vocab_size": 512, "hidden_size": 64, "num_blocks": 2, "num_heads": 2},
    "recurrent": {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "cell": "lstm"},
}
_TYPES = ("llama", "bert", "t5", "whisper", "clip", "mamba", "llava", "nothing", "LLAMA", "os", "")


def draw_tree(draw: Draw[Any]) -> dict[str, dict[str, Any]]:
    """Draw a run config of a few sections with a few keys, which `--dry-run` accepts."""
    tree: dict[str, dict[str, Any]] = {}
    for name in draw(st.lists(st.sampled_from([*_VALID]), min_size=2, max_size=6, unique=True)):
        keys = draw(st.lists(st.sampled_from([*_VALID[name]]), min_size=1, unique=True))
        tree[name] = {key: deepcopy(pick(draw, _VALID[name][key])) for key in keys}
    return tree


def draw_word(draw: Draw[Any]) -> str:
    """Draw one word of a command line that train.py may not understand."""
    way = pick(draw, ("listed", "path", "value", "value", "misspelt"))
    if way == "listed":
        return str(pick(draw, _WORDS))
    if way == "path":
        return f"{pick(draw, _PATH_KEYS)}={pick(draw, _PATHS)}"
    key: str = pick(draw, [*known_keys(), *_DS_KEYS])
    if way == "misspelt":
        spellings = (key[:-1], key.upper(), f"{key}.x", key.partition(".")[0], f"ds.{key}")
        key = pick(draw, spellings)
    return f"{key}={to_toml(draw(HOSTILE))}".replace("\0", "")[:100_000]


def config(draw: Draw[Any], place: Place, valid: bool) -> Case:
    """Write a TOML file for --config; it is planned, not run."""
    path, tree, note = place.folder / "run.toml", draw_tree(draw), "valid"
    path.write_text(toml_document(tree))
    if not valid:
        note = pick(draw, ("changed", "changed", "a key", "damaged", "no file"))
        if note == "changed":
            path.write_bytes(encoded(toml_document(draw(changed(tree)))))
        elif note == "a key":
            section, _, key = pick(draw, known_keys()).partition(".")
            tree.setdefault(section, {})[key] = draw(HOSTILE)
            path.write_bytes(encoded(toml_document(tree)))
        elif note == "damaged":
            path.write_bytes(draw(damaged(path.read_bytes())))
        else:
            note = replace_file(draw, path)
    return Case(["--config", str(path), "--dry-run"], note, valid=valid)


def words(draw: Draw[Any], _: Place, valid: bool) -> Case:
    """Return a dry run with a few valid words and, unless it is valid, one or two others."""
    argv = [
        f"{section}.{key}={to_toml(value)}"
        for section, values in draw_tree(draw).items()
        for key, value in values.items()
    ]
    wrong = [] if valid else [draw_word(draw) for _ in range(pick(draw, (1, 1, 2)))]
    for word in wrong:
        argv.insert(draw(st.integers(0, len(argv))), word)
    # An option that takes a value may consume the next word.
    argv.insert(0 if any(word.startswith("--config") for word in wrong) else len(argv), "--dry-run")
    return Case(argv, " ".join(map(ascii, wrong))[:150] or "valid", valid=valid)


def draw_json(draw: Draw[Any], path: Path, valid: bool) -> tuple[str, str, Any]:
    """Write a DeepSpeed JSON; return its name, the change, and its tree."""
    name: str = pick(draw, _JSONS)
    tree, note = _JSONS[name], "valid"
    if not valid:
        note = pick(draw, ("changed", "changed", "changed", "damaged", "no file"))
    if note == "changed":
        tree = draw(changed(tree))
    write_json(path, tree)
    if note == "damaged":
        path.write_bytes(draw(damaged(path.read_bytes())))
    elif note == "no file":
        note = replace_file(draw, path)
    return name, note, tree


def ds_json(draw: Draw[Any], place: Place, valid: bool) -> Case:
    """Write a DeepSpeed JSON for --deepspeed; it is planned, and trained for a step if that is
    cheap.
    """
    path = place.folder / "ds.json"
    name, note, tree = draw_json(draw, path, valid)
    text = to_json(tree)
    is_cheap = note in ("valid", "changed") and not any(key in text for key in _DEAR)
    if trained := is_cheap and pick(draw, (False, False, True)):
        own_bucket = "reduce_bucket_size" in text
        argv = [word for word in place.training() if word != SMALL_BUCKET or not own_bucket]
    else:
        argv = ["--dry-run"]
    divided = not trained and any(axis in text for axis in ("pipeline", "parallel"))
    if name == "zero2_bf16_states" or divided:
        valid = False  # needs a device with bf16, or more ranks
    return Case(["--deepspeed", str(path), *argv], f"{name}: {note}", valid=valid)


def draw_model(
    draw: Draw[Any], place: Place, valid: bool, families: dict[str, dict[str, Any]] = _MODELS
) -> tuple[str, str, list[str]]:
    """Write a folder with a config.json; return its family, the change, and the words."""
    family: str = pick(draw, families)
    tree: Any = {"model_type": family, **families[family]}
    folder, more, note = place.folder / "model", [], "valid"
    folder.mkdir(exist_ok=True)
    if not valid:
        ways = ("changed", "changed", "a key", "damaged", "no file", "code", "type", "override")
        note = pick(draw, ways)
    if note == "changed":
        tree = draw(changed(tree))
    elif note == "a key":
        tree[pick(draw, tree)] = draw(HOSTILE)
    elif note == "type":
        tree["model_type"] = pick(draw, _TYPES)
    elif note == "override":
        key = pick(draw, tree)
        word = f"model.overrides.{key}={to_toml(draw(HOSTILE))}"
        more = [word.replace("\0", "")[:100_000]]
    elif note == "code":  # beside it, which nobody requested
        classes = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}
        tree["auto_map"] = classes
        tree["model_type"] = pick(draw, (family, "x", "custom"))
        place.plant_code(folder)
    path = folder / "config.json"
    write_json(path, tree)
    if note == "damaged":
        path.write_bytes(draw(damaged(path.read_bytes())))
    elif note == "no file":
        note = replace_file(draw, path)
    return family, note, [f"model.name={folder}", *more]


def model(draw: Draw[Any], place: Place, valid: bool) -> Case:
    """Write a folder with a config.json, or overrides; half of them are trained for a step."""
    family, note, argv = draw_model(draw, place, valid)
    if draw(st.booleans()):
        argv.append("--dry-run")
    return Case([*place.training(model=False), *argv], f"{family}: {note}", valid=valid)


# fmt: off
_PLANNING = {
    "--model": ("tiny", "llama-3-8b", "gpt2-124m", "mixtral-8x7b", "qwen3-30b-a3b"),
    "--gpus": ("1", "8", "64"), "--gpus-per-node": ("4", "8"), "--gpu": ("h100-80", "a100-40"),
    "--micro-batch": ("1", "2"), "--seq-len": ("128", "1024"), "--accumulation": ("1", "4"),
    "--checkpointing": ("none", "full", "selective", "2"),
}
_SWEEPS = ("micro_batch=9..1", "x=1..2", "gpus=0..8", "gpus=1..", "seq_len=1..99999999999999",
           "micro_batch=1..10000000", "")
# Per tool: valid and invalid arguments. Those that would run for hours stop at their own limit.
_TOOLS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tools.estimate_memory": (
        ("", "--json", "--sweep micro_batch=1..4"),
        ("--plot=a.txt", "--plot=", "--plot=/dev/null/x.svg", "--plot=no/x.svg", "--sweep",
         *(f"--sweep={sweep}" for sweep in _SWEEPS)),
    ),
    "tools.show_layout": (("",), ("--plot=x.svg", "--plot=x", "--json")),
    "tools.plot_schedule": (
        ("--steps 10",),
        (*(f"--steps {n}" for n in (0, -1, "x", 9 * 10**20)), "train.epochs=2", "train.steps=0",
         "train.epochs=2 --steps 5", "--plot x.svg", "--plot x.gif", "train.steps=100000000",
         "ramp.batch_from=8 ramp.batch_tokens=100000"),
    ),
    "tests.gates.check_parity": ((), ("--cells x", "--cells", "--bogus", "x")),
    "tests.gates.check_checkpoints": ((), ("--cells x", "--bogus", "--cells \udcff")),
    "tests.gates.measure_memory": ((), ("--cells x", "--bogus", "--out")),
    "tools.rehearse": ((), ("--gpus x", "--gpus 0", "--ranks 0", "--bogus", "--ranks")),
    "tools.find_lr": ((), ("--from 1 --to 0", "--from x", "--steps -1", "--plot x", "optim.lr=-1")),
    "tools.preflight": ((), ("--bogus", "--deepspeed", "optim.lr=-1", "x")),
    "tools.show_batch": ((), ("nowhere --step 1", ".", ". --step 0", ". --step x")),
    "tools.export_hf": ((), ("nowhere", "", ".", ". --step x", "\udcff", "secret.txt")),
    "tools.import_checkpoint": ((), ("nowhere --out x", "", ".", ". --out x")),
}
# fmt: on
_PLANNERS = ("tools.estimate_memory", "tools.show_layout")


def arguments(draw: Draw[Any], place: Place, valid: bool) -> Case:
    """Return a planning tool with valid and invalid arguments, or another tool with invalid
    ones.
    """
    place.secret()
    often = (*_PLANNERS, "tools.plot_schedule")
    main: str = pick(draw, often if valid else (*_TOOLS, *often, *often))
    good, wrong = _TOOLS[main]
    argv: list[str] = pick(draw, good if valid else wrong).split()
    if main in _PLANNERS:
        flags = draw(st.lists(st.sampled_from([*_PLANNING]), unique=True, max_size=5))
        values = {flag: pick(draw, _PLANNING[flag]) for flag in flags}
        if not valid and flags and draw(st.booleans()):
            argv = []
            values[flags[0]] = str(draw(NUMBERS | TEXTS)).replace("\0", "")
        shipped = REPOSITORY / "ds_configs" / pick(draw, ("zero1.json", "zero2.json", "fp16.json"))
        argv = [f"--deepspeed={shipped}", *(f"{k}={v}" for k, v in values.items()), *argv]
    if not valid and main in often and draw(st.booleans()):
        argv.append(draw_word(draw))
    return Case(argv, f"{main} {ascii(' '.join(argv))[:120]}", main=main, valid=valid)


KINDS = {config: 110, words: 170, ds_json: 170, model: 60, arguments: 80}  # a model is trained


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_inputs_keep_the_rule(inputs: Inputs, kind: Any) -> None:
    inputs.brief(kind, 2)


@pytest.mark.gate("inputs")
@pytest.mark.parametrize("kind", KINDS)
def test_seeded_inputs_keep_the_rule(inputs: Inputs, kind: Any) -> None:
    inputs.seeded(kind, KINDS[kind])


def _words_of(draw: Draw[Any], place: Place, kind: str) -> list[str]:
    """Draw the words of a plan, and their files."""
    if kind == "json":
        draw_json(draw, place.folder / "ds.json", valid=False)
        return ["--deepspeed", str(place.folder / "ds.json")]
    if kind == "model":
        return draw_model(draw, place, valid=False, families=_MODELS | _TRACED)[2]
    return (config if kind == "config" else words)(draw, place, False).argv


def _not_traced(request: object) -> NoReturn:
    raise Untraceable  # it would run in another process for seconds


@MANY
@pytest.mark.parametrize("kind", ["config", "words", "json", "model"])
def test_words_are_planned_or_refused(
    kind: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, which is a hundred times faster: a plan, a ConfigError, or the parser's code
    2.
    """
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("harness.plan.memory.traced", _not_traced)

    @each(count)
    @given(st.data())
    def test(data: st.DataObject) -> None:
        place = Place(tmp_path / "input", cast(Any, None))
        remove(place.folder)
        place.folder.mkdir()
        argv = data.draw(st.composite(_words_of)(place, kind))
        assume(not any(path.is_symlink() or path.is_fifo() for path in place.folder.rglob("*")))
        with contextlib.suppress(ConfigError):
            try:
                plan_from(parse_command(argv), {"DS_ACCELERATOR": "cpu"})
            except SystemExit as end:
                if end.code not in (0, 2):
                    raise
        assert not place.marker.exists()

    test()


TURNS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "what is 1 + 2?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add",
     "arguments": '{"a": 1}'}}]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "it is 3"},
]  # fmt: skip
_SHARED = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
_RECORDS = (
    {"messages": TURNS, "tools": [{"name": "add"}]},
    {"conversations": _SHARED, "system": "s", "tools": "[]"},
    {"instruction": "a", "input": "b", "output": "c"},
    {"prompt": "a", "completion": "b"},
    {"prompt": TURNS[:2], "completion": TURNS[-1:], "system": "s"},
    {"query": "a", "response": "b", "history": [["c", "d"]], "functions": [{"name": "add"}]},
    {"conversation": [{"human": "a", "assistant": "b", "weight": 0}]},
    {"messages": [TURNS[1], {**TURNS[-1], "function_call": {"name": "f", "arguments": "{}"}}]},
    {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "attention_mask": [1, 1, 0]},
    {"segments": [{"text": "a", "label": False}, {"text": "b", "label": True}]},
    {"text": "a"},
)


@MANY
def test_a_changed_record_is_a_document_or_a_problem(count: int) -> None:
    @each(count * 5)
    @given(st.sampled_from(_RECORDS).flatmap(changed).filter(lambda record: type(record) is dict))
    def test(record: Any) -> None:
        try:
            document = read(record, {})[0]
            pieces = [] if isinstance(document, Chat | Ids) else [*document]
        except ValueError:
            return
        for piece in pieces:
            piece.text.encode()  # also raises a ValueError at a lone surrogate
        if isinstance(document, Chat):
            assert all(isinstance(turn["content"], str) for turn in document.messages)
            assert document.num_learned <= document.num_characters

    test()
