"""Wrong arguments of every tool: one short report with code 2; and what a tool imports for it."""

import pytest

from tests.run_tools import printed, run_tool

SMALL = ("--model", "gpt2-124m", "--gpus", 4, "--gpu", "a100-40", "--seq-len", 1024)
FIXED = {
    "plan_cluster": (*SMALL, "--global-batch", 64),
    "show_layout": ("--model", "gpt2-124m", "--gpus", 8),
}
Words = tuple[object, ...]
WRONG: dict[str, list[tuple[Words, list[str]]]] = {
    "accept_gpu": [
        (("--only", "nothing"), ["--only nothing: the steps are environment, optimizer"]),
        (("--ranks", 0), ["--ranks 0: it must be 1 to 8 here"]),
        (("--ranks", 9), ["--ranks 9: it must be 1 to 8 here"]),
        (("--json", "/nowhere/x.json"), ["there is no folder /nowhere"]),
    ],
    "estimate_memory": [
        (("--model", "lama-1b"), ["llama-1b"]),
        (("--gpu", "h10"), ["unknown GPU 'h10'"]),
        (("--gpus", 0), ["--gpus is 0"]),
        (("--micro-batch", 0), ["train.micro_batch"]),
        (("data.seqlen=3", "--gpus", 2, "ds.tensor_parallel.autotp_size=2"), ["data.seq_len"]),
        (("--sweep", "layers=1..3"), ["--sweep layers=1..3"]),
        (("--sweep", "gpus=2..4", "train.steps=3"), ["any other key=value goes before --sweep"]),
        (("--plot", "memory.gif"), [".svg or .png"]),
        (("--gpus", 3, "ds.pipeline.stages=2"), ["pipeline"]),
        (
            ("--gpus", 8, "ds.tensor_parallel.autotp_size=3"),
            ["must be a multiple of it: use 6 or 9 ranks"],
        ),
        (
            ("--model", "gpt2-124m", "--gpus", 5, "ds.tensor_parallel.autotp_size=5"),
            ["12 attention heads cannot be divided over 5"],
        ),
        (
            ("--gpus", 5, "--seq-len", 101, "ds.sequence_parallel_size=5"),
            ["sequence_parallel_size is 5: 101 tokens cannot be divided over 5 ranks"],
        ),
        (
            (*SMALL[:2], "--gpus", 8, "ds.pipeline.stages=4", "--sweep", "gpus=2..8"),
            ["2 ranks cannot be split"],
        ),
    ],
    "find_lr": [
        (
            ("--from", 1, "--to", 0.1, "--steps", 3, "--plot", "x.gif"),
            ["must be above 0", "at least 10", ".svg or .png"],
        ),
        (("optim.nmae=sgd",), ["optim.nmae"]),
    ],
    "plan_cluster": [
        (("--gpu", "h9000"), ["--gpu: unknown GPU 'h9000'"]),
        (("--gpus", 12), ["--gpus 12 is not a multiple of 8 GPUs per node"]),
        (("--model", "no/such"), ["no/such"]),
        (("--global-batch", 3, "--seq-len", 1023, "--lora", 8), ["--global-batch 3 is not divis"]),
        (("--quantize", "nf4"), ["--quantize nf4: it needs adapters: add --lora 16"]),
        (("optim.lrr=3",), ["optim.lr"]),
        (("optim.name=adafactor",), ["optim.name is 'adafactor' (command line): it keeps means"]),
        (
            ("train.micro_batch=3",),
            ["train.micro_batch=3 on any number of data ranks of 4 GPUs does"],
        ),
        (("train.epochs=3",), ["train.epochs: the planner reads no data: give --data-tokens"]),
        (("train.global_batch=32",), ["train.global_batch: the planner takes it from --"]),
        (("data.seq_len=512",), ["data.seq_len: the planner takes it from --seq-len: change that"]),
        (("--lora", 8, "model.lora.rank=4"), ["model.lora.rank: the planner takes it from --lora"]),
        (("train.steps=0",), ["train.steps=0 trains on nothing: give --data-tokens"]),
    ],
    "plot_schedule": [
        (
            ("--plot", "/nowhere/x.gif", "--steps", 0),
            ["must end in .svg or .png", "there is no folder", "--steps is 0"],
        ),
        (
            ("--steps", "9" * 20, "train.epochs=2"),
            [f"--steps is {'9' * 20}: it must be at most 9007199254740992"],
        ),
        (("optim.schedule=cosin",), ["optim.schedule is 'cosin'"]),
        (("train.epochs=2",), ["--steps"]),
    ],
    "rehearse": [
        (
            ("--gpus", 8, "train.step=10", "train.global_batch=20"),
            ["train.step (command line) is not a key"],
        ),
        (("--gpus", 8, "train.global_batch=20"), ["the nearest valid values are 16 or 24"]),
        (
            ("--gpus", 1, "--gpu", "h100-80", "model.name=llama-3-8b"),
            ["GiB of GPU memory, but 79.65 GiB are free"],
        ),
        (("--gpus", 8, "--ranks", 9), ["--ranks is 9"]),
        (("--device", "cuda"), ["--device cuda: there is no GPU here"]),
        (("--all", "--only", "zero9.json"), ["--only zero9.json: ds_configs/ has no such file"]),
        (("--only", "zero1.json"), ["it selects files of --all"]),
    ],
    "show_layout": [
        (("--plot", "x.gif", "ds.pipeline.stages=2"), ["must end in .svg or .png"]),
        (("ds.pipeline.stages=3",), ["8 ranks cannot be split into pipeline 3"]),
        (
            ("ds.pipeline.stages=2", "ds.pipeline.partition=[9,7]"),
            ["holds 16 decoder layers of 12"],
        ),
        (("ds.pipeline=2",), ["pipeline is 2 (command line): it must be an object"]),
    ],
    "sweep": [(("none.toml",), ["there is no file"])],
}  # fmt: skip


@pytest.mark.parametrize(
    ("tool", "words", "messages"), [(tool, *row) for tool, rows in WRONG.items() for row in rows]
)
def test_wrong_arguments_are_one_report(tool: str, words: Words, messages: list[str]) -> None:
    done = run_tool(tool, *FIXED.get(tool, ()), *words, code=2, CUDA_VISIBLE_DEVICES="")
    report = " ".join(done.stderr.split())
    assert all(message in report for message in messages), report
    assert "Traceback" not in report
    assert ("problems" in report) == (len(messages) > 1)


HEAVY = {"torch", "transformers", "deepspeed", "accelerate", "numpy", "matplotlib"}
PLAN = """
from harness.plan.command import parse_command, plan_from
from harness.run.dry_run import describe
describe(plan_from(parse_command([]), {"DS_ACCELERATOR": "cpu"}))
command = parse_command(["--dry-run", "--gpus", "8", "--gpu", "a100-80", "model.name=llama-1b"])
assert "time" in describe(plan_from(command, world=command.elsewhere()), True)
"""
LARGE = ["--model=llama-3-8b", "--deepspeed=ds_configs/zero3.json", "--gpus=64", "--gpu=h100-80"]
LIGHT = {
    "plan": PLAN,
    "estimate": f"from tools.estimate_memory import main; main({LARGE})",
    "layout": f"from tools.show_layout import main; main({[*LARGE, 'ds.pipeline.stages=2']})",
    "tokenize": "from tools.tokenize_data import main; main(['--workers=0'])",
    "tokenizers": "import tools.train_tokenizer, tools.compare_tokenizers",
}


@pytest.mark.parametrize("name", LIGHT)
def test_light_command_imports_no_heavy_package(name: str) -> None:
    code = f"import sys\n{LIGHT[name]}\nprint('loaded', sorted({HEAVY} & sys.modules.keys()))"
    assert printed(code).splitlines()[-1] == "loaded []"
