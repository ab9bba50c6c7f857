"""Checks that all ranks agree: code, configs, packages, data, tokenizer, weights, time."""

from __future__ import annotations

import hashlib
import json
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness.checkpoint.store import Store
from harness.config.run_config import run_and_step
from harness.data.build import cached_fingerprint
from harness.data.corpus import Corpus
from harness.data.source import corpus_of
from harness.data.spec import DataSpec
from harness.errors import ConfigError
from harness.plan.plan import Plan
from harness.run.plan_record import git_commit
from tools.made_with import PACKAGES
from tools.preflight_checks.report import Row, Verdict, by_text, grouped, same_row, who

LIBRARY = Path(__file__).resolve().parents[2] / "harness"
CLOCKS_S = 5.0  # locks and status files of two nodes are compared by their times
NOT_CACHED = "not tokenised yet"

_SAME_CODE = "start all ranks from one clone on shared storage, or update the clone there"
# check -> what mends it where it differs; in the order of the table.
_REMEDIES = {
    "run config": "the TOML file, or a file that it names, is not the same there: keep it on "
    "shared storage",
    "DeepSpeed JSON": "the file is not the same there: keep it on shared storage",
    "model config": "model.name leads to another config.json there: keep it on shared storage",
    "packages": "start all ranks in one environment (slurm/site.env)",
    "data": "data.path leads to other files there: copy them again, or use shared storage",
    "data times": "each such node tokenises for itself: copy with times (rsync -t, cp -p), or set "
    "data.cache_dir to shared storage after tokenising once",
    "fingerprint": "the tokenised data differ there, or are not there: set data.cache_dir to a "
    "folder that all nodes see",
    "weights": "model.init_from leads to other files there: copy them again",
}
_WARNS = {"data times"}


@dataclass(frozen=True)
class Seen:
    """One rank's values by check, as short texts that are compared; and files it could not read."""

    values: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def look(plan: Plan, trust_remote_code: bool, first_of_node: bool) -> Seen:
    """Return this rank's values. Files that may be many or large are read once per node."""
    values = {
        "code": _hash(*_library_files()),
        "run config": _hash(plan.config.model_dump(mode="json")),
        "DeepSpeed JSON": _hash(plan.deepspeed_given),
        "model config": _hash(plan.model_config),
        "packages": ", ".join(
            [f"python {platform.python_version()}", *(f"{p} {version(p)}" for p in PACKAGES)]
        ),
    }
    seen = Seen(values)
    if not first_of_node:
        return seen
    values["code"] += f", commit {(git_commit() or 'unknown')[:12]}"
    spec = DataSpec.of_run(plan.config, plan.model_config, trust_remote_code=trust_remote_code)
    try:
        values.update(
            _data([*map(corpus_of, [*spec.sources().values(), *spec.eval_sets().values()])])
        )
        fingerprint = cached_fingerprint(spec)
        values["fingerprint"] = fingerprint[:16] if fingerprint else NOT_CACHED
    except ConfigError as error:
        seen.problems.extend(error.problems)
    except OSError as error:
        seen.problems.append(f"data.path: cannot read {error.filename}: {error.strerror}")
    if (source := plan.config.model.init_from) is not None:
        try:
            values["weights"] = _weights(source)
        except OSError as error:
            seen.problems.append(f"model.init_from: cannot read {error.filename}: {error.strerror}")
    return seen


def _hash(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _library_files() -> Iterator[tuple[str, str]]:
    """Code, presets and tables."""
    for path in sorted(LIBRARY.rglob("*.*")):
        if path.suffix in (".py", ".toml", ".json", ".jinja"):
            yield str(path.relative_to(LIBRARY)), path.read_text(encoding="utf-8")


def _data(corpora: Sequence[Corpus]) -> dict[str, str]:
    """Names and sizes; times apart, as copies often have others; the ends are opened."""
    values = [_corpus(corpus) for corpus in corpora]
    return {key: "; ".join(value[key] for value in values) for key in values[0]}


def _corpus(corpus: Corpus) -> dict[str, str]:
    for file in {corpus.files[0], corpus.files[-1]}:
        with file.open("rb") as opened:
            opened.read(1)
    kind, python, stats = corpus.identity()
    assert isinstance(stats, list)
    sizes = [entry[:2] for entry in stats]
    size_gib = sum(size for _, size in sizes) / 2**30
    about = f"{kind}, {len(sizes)} files, {size_gib:.2f} GiB"
    return {"data": f"{about}, {_hash(python, sizes)}", "data times": _hash(stats)}


def _weights(source: str) -> str:
    run, step = run_and_step(source)
    store = Store(run / "checkpoints")
    if checkpoints := store.all():  # a run of ours, whose newest checkpoint is taken
        run = store.at(step) if step is not None else checkpoints[-1]
    if not run.is_dir():
        return f"{source} is no folder: every node gets it from the hub"
    files = sorted(run.glob("*.safetensors"))
    for file in files:
        with file.open("rb") as opened:
            opened.read(1)
    sizes = [(file.name, file.stat().st_size) for file in files]
    return f"{len(files)} files, {sum(size for _, size in sizes) / 2**30:.2f} GiB, {_hash(sizes)}"


# --- judged on rank 0 ---


def sameness_rows(seen: Mapping[int, Seen], hosts: Sequence[str]) -> list[Row]:
    """The checks of what must be the same; `seen` by rank."""
    commits = {r: s.values["code"] for r, s in seen.items() if ", " in s.values.get("code", "")}
    hashes = {r: s.values["code"].partition(",")[0] for r, s in seen.items()}
    rows = [same_row("code", hashes, hosts, _SAME_CODE)]
    if rows[0].verdict == "ok" and commits:
        rows = [same_row("code", commits, hosts, _SAME_CODE)]
    for check, remedy in _REMEDIES.items():
        values = {r: s.values[check] for r, s in seen.items() if check in s.values}
        row = _row(check, values, hosts, remedy)
        if not values or (check == "data times" and row.verdict == "ok"):
            continue
        rows.append(row)
    problems = by_text((rank, text) for rank, of_rank in seen.items() for text in of_rank.problems)
    if problems:
        todo = "make it readable from every node; the text names the key"
        return [*rows, Row("readable", "FAIL", grouped(problems, hosts), todo)]
    return [*rows, Row("readable", "ok", "data, tokenizer and weights open on every node")]


def _row(check: str, values: Mapping[int, str], hosts: Sequence[str], remedy: str) -> Row:
    bad: Verdict = "warn" if check in _WARNS else "FAIL"
    row = same_row(check, values, hosts, remedy, bad)
    if check == "fingerprint" and row.found == NOT_CACHED:
        return Row(check, "ok", f"{NOT_CACHED}: the start of the run does it, once for each cache")
    return row


def clock_row(clocks_s: Mapping[int, float], hosts: Sequence[str]) -> Row:
    """Clocks read when rank 0's word came, which is at almost the same time everywhere."""
    middle = statistics.median(clocks_s.values())
    off = {rank: clock - middle for rank, clock in clocks_s.items()}
    most = max(abs(value) for value in off.values())
    far = [rank for rank, value in off.items() if abs(value) > CLOCKS_S]
    if not far:
        return Row("clocks", "ok", f"within {most:.1f} s of their median")
    todo = "start the time service there (chronyc tracking): locks and times of saves rely on it"
    text = f"up to {most:.1f} s from their median: {who(far, hosts)}"
    return Row("clocks", "warn", text, todo)
