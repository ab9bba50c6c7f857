"""Checks that code, configs, packages, data, weights and the storage of the run folder are the same
on all ranks.
"""

import hashlib
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness.checkpoint.store import Store
from harness.config.run_config import run_and_step
from harness.data.build import cached_fingerprint
from harness.data.spec import DataSpec, corpus_of
from harness.errors import ConfigError
from harness.estimate.memory_item import GIB
from harness.files.corpus import Corpus
from harness.plan.machine import RUNS, Room, room_remedy
from harness.plan.plan import Plan
from harness.run.plan_record import git_commit
from harness.runfolder import saved_steps
from tools.made_with import PACKAGES
from tools.preflight_checks.report import (
    Row,
    Verdict,
    named_row,
    problem_row,
    same_row,
    slow,
    span,
    who,
)

LIBRARY = Path(__file__).resolve().parents[2] / "harness"
NOT_CACHED = "not tokenised yet"
_MIB = 2**20
_WRITTEN_MIB = 64
_SEEN_WITHIN_S = 10.0  # network file systems show new files late
_SLOW_SAVE_S = 300.0

# check -> advice if ranks differ; in the order of the table.
_REMEDIES = {
    "code": "start all ranks from one clone on shared storage, or update the clone there",
    "run config": "the TOML file, or a file that it names, differs there: keep it on "
    "shared storage",
    "DeepSpeed JSON": "the file differs there: keep it on shared storage",
    "model config": "model.name points to a different config.json there: keep it on shared storage",
    "packages": "start all ranks in one environment (slurm/site.env)",
    "data": "data.path points to different files there: copy them again, or use shared storage",
    "data times": "each such node tokenises separately: copy with times (rsync -t, cp -p), or set "
    "data.cache_dir to shared storage after tokenising once",
    "fingerprint": "the tokenised data is missing or different there: set data.cache_dir to a "
    "folder that all nodes see",
    "weights": "model.init_from points to different files there: copy them again",
}


@dataclass(frozen=True)
class Seen:
    """One rank's values by check, as short texts to compare, and problems with its files."""

    values: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Storage:
    """One rank's view of the file system of the run folder."""

    folder: str  # the run folder, or the nearest folder above it that exists
    sees_token: bool = False  # True if the file that rank 0 made is visible here
    free_bytes: int | None = None
    checkpoints: tuple[int, ...] = ()  # steps of those that the run already has
    written_bytes_per_s: float | None = None
    """With fsync, while the first rank of every node writes; None on the other ranks."""
    problem: str | None = None


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
    key = "data.path"
    try:
        values.update(
            _data([*map(corpus_of, [*spec.sources().values(), *spec.eval_sets().values()])])
        )
        fingerprint = cached_fingerprint(spec)
        values["fingerprint"] = fingerprint[:16] if fingerprint else NOT_CACHED
        key = "model.init_from"
        if plan.config.model.init_from is not None:
            values["weights"] = _weights(plan.config.model.init_from)
    except ConfigError as error:
        seen.problems.extend(error.problems)
    except OSError as error:
        seen.problems.append(f"{key}: cannot read {error.filename}: {error.strerror}")
    return seen


def _hash(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _library_files() -> Iterator[tuple[str, str]]:
    for path in sorted(LIBRARY.rglob("*.*")):
        if path.suffix in (".py", ".toml", ".json", ".jinja"):
            yield str(path.relative_to(LIBRARY)), path.read_text(encoding="utf-8")


def _data(corpora: Sequence[Corpus]) -> dict[str, str]:
    """Return names and sizes of all files, and separately their times, which many copies do not
    keep.
    """
    data, times = [], []
    for corpus in corpora:
        _open(corpus.files[0], corpus.files[-1])
        kind, python, stats = corpus.identity()
        assert isinstance(stats, list)
        sizes = [entry[:2] for entry in stats]
        size_gib = sum(size for _, size in sizes) / 2**30
        data.append(f"{kind}, {len(sizes)} files, {size_gib:.2f} GiB, {_hash(python, sizes)}")
        times.append(_hash(stats))
    return {"data": "; ".join(data), "data times": "; ".join(times)}


def _weights(source: str) -> str:
    run, step = run_and_step(source)
    store = Store(run / "checkpoints")
    if checkpoints := store.all():  # a run of ours, whose newest checkpoint is taken
        run = store.at(step) if step is not None else checkpoints[-1]
    if not run.is_dir():
        return f"{source} is not a folder: every node downloads it from the hub"
    files = sorted(run.glob("*.safetensors"))
    _open(*files)
    sizes = [(file.name, file.stat().st_size) for file in files]
    return f"{len(files)} files, {sum(size for _, size in sizes) / 2**30:.2f} GiB, {_hash(sizes)}"


def _open(*files: Path) -> None:
    """Read a byte of each file. Raises OSError if that fails."""
    for path in files:
        with path.open("rb") as file:
            file.read(1)


def nearest_folder(plan: Plan) -> Path:
    """Return the run folder, or the folder where it will be made."""
    wished = Path(plan.config.run.dir or RUNS).expanduser().absolute()
    return next(path for path in (wished, *wished.parents) if path.is_dir())


@contextmanager
def token(folder: Path) -> Iterator[str]:
    """Create a file that all ranks must see; remove it at the end.

    If it cannot be created, yield a path that no rank will see.
    """
    with ExitStack() as stack:
        try:
            path = stack.enter_context(
                tempfile.NamedTemporaryFile(dir=folder, prefix=".preflight-")
            ).name
        except OSError:
            path = str(folder / ".preflight-could-not-be-made")
        yield path


def measure_storage(plan: Plan, token_path: str, writes: bool) -> Storage:
    """Look at the run folder from this rank. `writes`: also time writing a file."""
    folder = nearest_folder(plan)
    sees = _appears(Path(token_path))
    checkpoints = tuple(saved_steps(plan.config.run.dir))
    free, rate, problem = None, None, None
    try:
        free = shutil.disk_usage(folder).free
        # The better of two: writes of other jobs at that moment are not the storage's fault.
        rate = max(_write_rate(folder) for _ in range(2)) if writes else None
    except OSError as error:
        problem = f"{folder}: {error.strerror or error}"
    return Storage(str(folder), sees, free, checkpoints, rate, problem)


def _appears(path: Path) -> bool:
    until = time.monotonic() + _SEEN_WITHIN_S
    while not path.exists():
        if time.monotonic() > until or path.name.endswith("could-not-be-made"):
            return False
        time.sleep(0.2)
    return True


def _write_rate(folder: Path) -> float:
    """Return the rate in bytes per second of writing an unnamed file, which never leaves anything
    behind.
    """
    blocks = [os.urandom(_MIB) for _ in range(8)]  # incompressible
    with tempfile.TemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        for number in range(_WRITTEN_MIB):
            file.write(blocks[number % len(blocks)])
        file.flush()
        os.fsync(file.fileno())
        return _WRITTEN_MIB * _MIB / (time.perf_counter() - began)


# --- judged on rank 0 ---


def sameness_rows(seen: Mapping[int, Seen], hosts: Sequence[str]) -> list[Row]:
    """Return the checks of what must be the same; `seen` by rank."""
    rows = []
    for check, remedy in _REMEDIES.items():
        values = {r: s.values[check] for r, s in seen.items() if check in s.values}
        bad: Verdict = "warn" if check == "data times" else "FAIL"
        if check == "code":  # all ranks have a hash, the first of each node the commit too
            hashes = {rank: value.partition(",")[0] for rank, value in values.items()}
            commits = {rank: value for rank, value in values.items() if ", " in value}
            values = commits if commits and len(set(hashes.values())) == 1 else hashes
        row = same_row(check, values, hosts, remedy, bad)
        if check == "fingerprint" and row.found == NOT_CACHED:
            text = f"{NOT_CACHED}: the start of the run does it, once for each cache"
            row = Row(check, "ok", text)
        if values and (check != "data times" or row.verdict != "ok"):
            rows.append(row)
    problems = [(rank, text) for rank, of_rank in seen.items() for text in of_rank.problems]
    fine = "data, tokenizer and weights open on every node"
    todo = "make it readable from every node; the message names the key"
    return [*rows, problem_row("readable", fine, problems, hosts, todo, "FAIL")]


def storage_rows(plan: Plan, seen: dict[int, Storage], hosts: Sequence[str]) -> list[Row]:
    """Return the checks of the run folder; `seen` by rank."""
    return [_same(seen, hosts), _room(plan, seen, hosts), *_writing(plan, seen, hosts)]


def _same(seen: dict[int, Storage], hosts: Sequence[str]) -> Row:
    blind = [rank for rank, storage in seen.items() if not storage.sees_token]
    first, folder = min(seen), seen[min(seen)].folder
    if not blind:
        return Row("run folder", "ok", f"{folder} is the same on all nodes")
    if first in blind:
        text = f"{who([first], hosts)} cannot create a file in {folder}"
        return Row("run folder", "FAIL", text, "choose a run.dir that this user can write to")
    text = f"what {who([first], hosts)} wrote in {folder} is not seen on {who(blind, hosts)}"
    todo = "set run.dir to a path on storage that all nodes mount: checkpoints are written by all"
    return Row("run folder", "FAIL", text, todo)


def _room(plan: Plan, seen: dict[int, Storage], hosts: Sequence[str]) -> Row:
    free = {r: s.free_bytes / GIB for r, s in seen.items() if s.free_bytes is not None}
    if not free:
        return Row("room", "warn", "unknown", "check the quota that the storage reports")
    text = span(free.values(), "GiB free", ".2f")
    room = Room.of(plan, seen[min(seen)].checkpoints)
    if room is None:
        return Row("room", "ok", f"{text}; a checkpoint's size is unknown here")
    text += f"; room is needed for {room.text}: {room.bytes / GIB:.2f} GiB"
    few = [rank for rank, gib in free.items() if gib < room.bytes / GIB]
    todo = room_remedy(plan, room, min(free.values()) * GIB)
    bad: Verdict = "warn" if plan.config.plan.force else "FAIL"
    return named_row("room", text, "too little for", few, hosts, todo, bad)


def _writing(plan: Plan, seen: dict[int, Storage], hosts: Sequence[str]) -> list[Row]:
    problems = {rank: s.problem for rank, s in seen.items() if s.problem}
    if problems:
        listed = "; ".join(dict.fromkeys(problems.values()))
        todo = "free space there, or choose another run.dir: 64 MiB could not be written"
        return [Row("write speed", "FAIL", f"{listed} ({who(problems, hosts)})", todo)]
    rates = {r: s.written_bytes_per_s / _MIB for r, s in seen.items() if s.written_bytes_per_s}
    if not rates:
        return []
    text = span(rates.values(), "MiB/s from each node, all at once", ".0f")
    late = slow(rates)
    if plan.estimate is not None:
        # Each node writes what its ranks hold; a save waits for the slowest.
        seconds = plan.estimate.checkpoint_bytes / len(rates) / _MIB / min(rates.values())
        text += f": about {seconds:.1f} s for a checkpoint"
        if seconds > _SLOW_SAVE_S and not late:
            todo = "save less often (save.every), in the background (save.async=true), or elsewhere"
            return [Row("write speed", "warn", text, todo)]
    todo = "check the mount and its network there: every save waits for the slowest node"
    return [named_row("write speed", text, "slow:", late, hosts, todo)]
