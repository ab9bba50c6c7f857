"""The machine: what the preflight finds on every rank, and the optional packages."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version

from harness.launch.ranks import REPOSITORY
from tools.acceptance.bench import Bench, expect, tail
from tools.acceptance.report import Check

_OPTIONAL = ("triton", "flash_attn", "liger_kernel", "bitsandbytes")
_LIMIT_S = {"cuda": 80, "cpu": 600}
_SHOWN = ("matmul rate", "all-reduce")


def look(bench: Bench) -> str:
    """Run the preflight, whose rows that fail are checks; warnings are shown in the figure."""
    warnings: list[str] = []
    bench.check("preflight", lambda: _flown(bench, warnings))
    bench.check("optional packages", _packages)
    bench.not_on_cpu("driver, toolkit, GPUs and the links between them")
    rows = bench.values.get("preflight", {})
    parts = [rows[name] for name in _SHOWN if name in rows]
    return "; ".join([*parts, *([f"warnings: {', '.join(warnings)}"] if warnings else [])])


def _flown(bench: Bench, warnings: list[str]) -> str:
    json_path = REPOSITORY / "ds_configs" / "zero1.json"
    arguments = ["--json", f"--limit-s={_LIMIT_S[bench.accelerator]}", f"--deepspeed={json_path}"]
    arguments += [*bench.settings, f"run.dir={bench.folder / 'run'}"]
    ended = bench.run("tools.preflight", arguments, "preflight")
    start = ended.outputs[0].find("{")
    expect(start >= 0, f"ranks ended with {ended.codes}: {tail(ended)}")
    report, _ = json.JSONDecoder().raw_decode(ended.outputs[0][start:])
    rows = report["checks"]
    bench.values["preflight"] = {row["check"]: row["found"] for row in rows}
    for row in rows:
        if row["verdict"] == "FAIL":
            bench.checks.append(Check(row["check"], "failed", f"{row['found']}; {row['todo']}"))
    warnings += [row["check"] for row in rows if row["verdict"] == "warn"]
    return f"{len(rows)} rows"


def _packages() -> str:
    versions = []
    for name in _OPTIONAL:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            versions.append(f"no {name}")
    return ", ".join(versions)
