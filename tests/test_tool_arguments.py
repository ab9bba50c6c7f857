"""Wrong arguments of every tool: one short report with code 2; and what a tool imports for it."""

import shlex

import pytest

from tests.run_tools import printed, run_tool
from tests.tables import beside

TABLES = beside(__file__, "tool_arguments.toml")
ROWS = [(tool, *row) for tool, rows in TABLES["wrong"].items() for row in rows.items()]


@pytest.mark.parametrize(("tool", "line", "said"), ROWS)
def test_wrong_arguments_are_one_report(tool: str, line: str, said: str | list[str]) -> None:
    words = shlex.split(f"{TABLES['fixed'].get(tool, '')} {line}")
    done = run_tool(tool, *words, code=2, CUDA_VISIBLE_DEVICES="")
    messages = [said] if isinstance(said, str) else said
    report = " ".join(done.stderr.split())
    assert all(message in report for message in messages), report
    assert "Traceback" not in report
    assert ("problems" in report) == (len(messages) > 1)


HEAVY = {"torch", "transformers", "deepspeed", "accelerate", "numpy", "matplotlib"}
LARGE = ["--model=llama-3-8b", "--deepspeed=ds_configs/zero3.json", "--gpus=64", "--gpu=h100-80"]


@pytest.mark.parametrize("name", TABLES["light"])
def test_light_command_imports_no_heavy_package(name: str) -> None:
    loaded = f"print('loaded', sorted({HEAVY} & sys.modules.keys()))"
    code = f"import sys\nLARGE = {LARGE}\n{TABLES['light'][name]}\n{loaded}"
    assert printed(code).splitlines()[-1] == "loaded []"
