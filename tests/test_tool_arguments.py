"""Wrong arguments of every tool: one short report with code 2; and what a tool imports for it."""

import shlex
import tomllib
from pathlib import Path

import pytest

from tests.run_tools import printed, run_tool

FIXED = {
    "plan_cluster": "--model gpt2-124m --gpus 4 --gpu a100-40 --seq-len 1024 --global-batch 64",
    "show_layout": "--model gpt2-124m --gpus 8",
}
WRONG = tomllib.loads(Path(__file__).with_name("tool_arguments.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("tool", "line", "said"), [(tool, *row) for tool, rows in WRONG.items() for row in rows.items()]
)
def test_wrong_arguments_are_one_report(tool: str, line: str, said: str | list[str]) -> None:
    words = shlex.split(f"{FIXED.get(tool, '')} {line}")
    done = run_tool(tool, *words, code=2, CUDA_VISIBLE_DEVICES="")
    messages = [said] if isinstance(said, str) else said
    report = " ".join(done.stderr.split())
    assert all(message in report for message in messages), report
    assert "Traceback" not in report
    assert ("problems" in report) == (len(messages) > 1)


HEAVY = {"torch", "transformers", "deepspeed", "accelerate", "numpy", "matplotlib"}
PLAN = """
from harness.plan.command import parse_command, plan_from
from harness.run.dry_run import dry_run
dry_run(plan_from(parse_command([]), {"DS_ACCELERATOR": "cpu"})).text()
command = parse_command(["--dry-run", "--gpus", "8", "--gpu", "a100-80", "model.name=llama-1b"])
assert "time" in dry_run(plan_from(command, world=command.elsewhere()), True).text()
"""
LARGE = ["--model=llama-3-8b", "--deepspeed=ds_configs/zero3.json", "--gpus=64", "--gpu=h100-80"]
LIGHT = {
    "plan": PLAN,
    "estimate": f"from tools.estimate_memory import main; main({LARGE})",
    "layout": f"from tools.show_layout import main; main({[*LARGE, 'ds.pipeline.stages=2']})",
    "batch_job": "import tools.batch_job",
    "tokenize": "from tools.tokenize_data import main; main(['--workers=0'])",
}


@pytest.mark.parametrize("name", LIGHT)
def test_light_command_imports_no_heavy_package(name: str) -> None:
    code = f"import sys\n{LIGHT[name]}\nprint('loaded', sorted({HEAVY} & sys.modules.keys()))"
    assert printed(code).splitlines()[-1] == "loaded []"
