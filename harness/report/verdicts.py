"""Verdicts on a run's records, and what to do next."""

import shlex
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from harness.config.assignments import DECIDED, value_as_text
from harness.config.ds_json import AUTO, PREFIX
from harness.errors import ExitCode
from harness.files.paths import script
from harness.layout.world import SHARES_GPU
from harness.report.charts import compares_pairs
from harness.report.events import no_better
from harness.report.formatting import count, duration, moment, sentence, short
from harness.report.lines import number
from harness.report.run_record import RunRecord

MEMORY_ERROR = 0.1  # relative; the same as TOLERANCE in run/live_memory.py
MEMORY_FROM = 2**30  # bytes; below, buffers of fixed size make errors that mean nothing
LENGTHS = ("train.steps", "train.tokens", "train.epochs")
"""Keys of which a command may have at most one."""
_SAME = {
    "optim.lr": ("optimizer.params.lr", "scheduler.params.warmup_max_lr"),
    "train.steps": ("scheduler.params.total_num_steps",),
}
"""Keys of the DeepSpeed JSON that must not contradict a changed one (plan/merge_settings.py)."""
_FORETOLD = ("unfinished_warmup", "few_steps", "without_target")
"""Events of plan/batches.py and data/source.py."""


class Verdict(NamedTuple):
    """One judgement."""

    kind: str
    """good | warning | bad."""
    text: str


class Advice(NamedTuple):
    """Something to do."""

    text: str
    command: str = ""


def verdicts(run: RunRecord) -> list[Verdict]:
    """Return what the records say about loss, norm, steps, memory and speed."""
    checks = (
        _foretold,
        _learned,
        _losing,
        _generalising,
        _baselines,
        _norm,
        _bad_steps,
        _bad_rows,
        _replicas,
        _memory,
        _speed,
        _entropy,
    )
    return [verdict for check in checks if (verdict := check(run)) is not None]


def _foretold(run: RunRecord) -> Verdict | None:
    """Repeat why the run was too short to learn, or learned nothing from some documents."""
    texts = dict.fromkeys(str(event.get("message")) for event in run.of_kind(*_FORETOLD))
    return Verdict("warning", f"{sentence('; '.join(texts))}.") if texts else None


def _learned(run: RunRecord) -> Verdict | None:
    """Compare the last held-out loss with that before training."""
    problem = _no_better(run)
    return None if problem is None else Verdict("warning", f"{sentence(problem)}.")


def _no_better(run: RunRecord) -> str | None:
    """Return the problem of a run that is done and ended no better than it began."""
    evaluations = run.evaluations()
    if run.outcome != "done" or len(evaluations) < 2 or evaluations[0][0] != 0:
        return None
    return no_better(evaluations[0][1], evaluations[-1][1])


def _losing(run: RunRecord) -> Verdict | None:
    values = _even(run, "loss")
    if len(values) < 20:
        return None
    tail = max(5, len(values) // 10)
    before, last = fmean(values[-2 * tail : -tail]), fmean(values[-tail:])
    change = f"{before:.3f} to {last:.3f} over the last {tail} of {len(values)} points"
    if last > before * 1.02:
        return Verdict("warning", f"Training loss rises: {change}.")
    return Verdict("good", f"Training loss {'falls' if last < before else 'is level'}: {change}.")


def _generalising(run: RunRecord) -> Verdict | None:
    best, evaluations = run.lowest(), run.evaluations()
    if best is None or len(evaluations) < 3:
        return None
    step, last = evaluations[-1]
    if last > best[1] * 1.01:
        return Verdict(
            "warning",
            f"Held-out loss was best at step {best[0]:,} ({best[1]:.3f}) and is {last:.3f} at step "
            f"{step:,}: the model is memorising its training data.",
        )
    return Verdict("good", f"Held-out loss is at its best, or close: {last:.3f}.")


def _baselines(run: RunRecord) -> Verdict | None:
    """Compare the held-out loss with that of a unigram and a bigram model (data/data.py)."""
    (unigram, bigram), best = _counted(run), run.best()
    if best is None or unigram is None or bigram is None:
        return None
    names = f"a bigram model's {bigram:.2f} and a unigram model's {unigram:.2f}"
    if best[1] >= unigram:
        return Verdict("warning", f"Held-out loss {best[1]:.2f} is above {names}.")
    where = "below" if best[1] < bigram else "between"
    return Verdict("good", f"Held-out loss {best[1]:.2f} is {where} {names}.")


def _counted(run: RunRecord) -> tuple[float | None, float | None]:
    """Return the held-out losses of a unigram and a bigram model; None if they were not counted."""
    event = run.last_event("baselines") or {}
    return number(event.get("unigram_nats")), number(event.get("bigram_nats"))


def _norm(run: RunRecord) -> Verdict | None:
    values = _even(run, "grad_norm")
    if len(values) < 20:
        return None
    quarter = len(values) // 4
    early, late = median(values[quarter : 2 * quarter]), median(values[-quarter:])
    text = f"median {short(early)} in the second quarter, {short(late)} in the last"
    if late > 3 * early:
        return Verdict("warning", f"Gradient norm grows: {text}.")
    return Verdict("good", f"Gradient norm is stable: {text}.")


def _bad_steps(run: RunRecord) -> Verdict | None:
    if not run.trained:
        return None
    names = {"spike": "spike", "skipped_step": "skipped step", "rollback": "rollback"}
    events = [(name, len(run.of_kind(kind))) for kind, name in names.items()]
    counts = [f"{n} {name}{'s' * (n > 1)}" for name, n in events if n]
    if not counts:
        return Verdict("good", "No spike, no skipped step, no rollback.")
    kind = "bad" if run.of_kind("rollback") else "warning"
    return Verdict(kind, f"{', '.join(counts)}: see the events.")


def _bad_rows(run: RunRecord) -> Verdict | None:
    """Report what data.bad_rows left out, once for each source, because every start records it."""
    events = {str(event.get("source")): event for event in run.of_kind("bad_rows")}
    texts = [str(event.get("message")) for event in events.values()]
    return Verdict("warning", f"{'; '.join(texts)}.") if texts else None


def _replicas(run: RunRecord) -> Verdict | None:
    if run.of_kind("replicas_differ"):
        return Verdict("bad", "Ranks hold different copies of the same state: see the events.")
    return None


def memory_rows(run: RunRecord) -> list[tuple[str, float, float]]:
    """Return point, predicted and measured bytes of the worst rank, from the first steps."""
    rows = (run.last_event("memory") or {}).get("rows")
    worst: dict[str, tuple[str, float, float]] = {}
    for row in rows if isinstance(rows, list) else ():
        fields = row if isinstance(row, dict) else {}
        predicted, measured = number(fields.get("predicted")), number(fields.get("measured"))
        if predicted is None or measured is None:
            continue
        point = str(fields.get("point"))
        if point not in worst or measured > worst[point][2]:
            worst[point] = (point, predicted, measured)
    return list(worst.values())


def _memory(run: RunRecord) -> Verdict | None:
    rows = [row for row in memory_rows(run) if max(row[1:]) >= MEMORY_FROM]
    if not rows:
        return None
    errors = {point: predicted / max(measured, 1) - 1 for point, predicted, measured in rows}
    point = max(errors, key=lambda name: abs(errors[name]))
    text = f"predicted {errors[point]:+.1%} ({point.replace('_', ' ')})"
    if abs(errors[point]) > MEMORY_ERROR:
        return Verdict("warning", f"Memory is not as predicted: {text}.")
    return Verdict("good", f"Memory is as predicted: {text}.")


def _speed(run: RunRecord) -> Verdict | None:
    values = _even(run, "step_time_s")
    if len(values) < 20 or run.ranks_per_gpu > 1:
        return None
    usual = median(values)
    slow = sum(value > 2 * usual for value in values) / len(values)
    text = f"a step takes {duration(usual)}"
    if slow > 0.05:
        text = f"{text}, and {slow:.0%} take more than twice that"
        return Verdict("warning", f"Speed is uneven: {text}.")
    return Verdict("good", f"Speed is steady: {text}.")


def _entropy(run: RunRecord) -> Verdict | None:
    prefix = "attention_entropy/"
    lines = [line for line in run.lines if any(key.startswith(prefix) for key in line)]
    if len(lines) < 2:
        return None
    fallen = [
        key.removeprefix(prefix)
        for key in lines[0]
        if key.startswith(prefix)
        and (first := number(lines[0][key])) is not None
        and (last := number(lines[-1].get(key))) is not None
        and last < 0.1 * first
    ]
    if fallen:
        return Verdict("warning", f"Attention has collapsed in layers {', '.join(fallen[:12])}.")
    return Verdict("good", "Attention entropy is moderate in every layer.")


def _even(run: RunRecord, key: str) -> list[float]:
    return [value for _, value in run.even_values(key)]


def ending(run: RunRecord) -> Verdict:
    """Return how the run ended, or its current state."""
    step, total = run.step, run.total_steps
    of_total = f" of {total:,}" if total else ""
    message = run.status.get("message")
    why = f": {message}" if message else ""
    if run.outcome == "done":
        return Verdict("good", f"Done at step {step:,}{of_total}.")
    if run.is_silent():
        since = moment(run.last_sign)
        return Verdict("bad", f"Nothing was written since {since}: the run may have died.")
    if run.outcome == "running":
        return Verdict("good", f"Running: step {step:,}{of_total}{_left(run)}.")
    if run.outcome == "stopped":
        return Verdict("warning", f"Stopped cleanly at step {step:,}{of_total}{why}.")
    if run.outcome in ("failed", "diverged"):
        code = run.status.get("code")
        return Verdict(
            "bad", f"{run.outcome.capitalize()} at step {step:,}{of_total}, code {code}{why}."
        )
    return Verdict("warning", "No status is on record.")


def state(run: RunRecord) -> str:
    """Return the run's outcome in a word or, for a silent one, how long it has been silent."""
    if run.is_silent() and run.last_sign is not None:
        return f"no progress for {duration(time.time() - run.last_sign)}"
    return run.outcome


def _left(run: RunRecord) -> str:
    seconds, total = _even(run, "step_time_s")[-50:], run.total_steps
    if not seconds or not total:
        return ""
    return f", {duration(fmean(seconds) * max(0, total - run.step))} left"


def advice(run: RunRecord) -> list[Advice]:
    """Return what to do next, the most likely advice first, with commands that can be copied."""
    run = replace(run, path=run.path.resolve()) if _started_in(run) else run
    return [*_by_outcome(run), *_by_curve(run)]


def _started_in(run: RunRecord) -> str:
    """Return the folder where the run's relative paths begin; "" if it is the current one."""
    folder = Path(run.text("started_in"))
    return str(folder) if folder.is_dir() and not folder.samefile(".") else ""


def _by_outcome(run: RunRecord) -> list[Advice]:
    folder, code = shlex.quote(str(run.path)), run.status.get("code")
    best = run.best()
    memory = run.last_event("out_of_memory") or {}
    if run.outcome == "failed" and memory.get("attempt", 0) == run.status.get("attempt"):
        helps = str(memory.get("message", "")).rpartition("; ")[2]
        return [Advice(f"It ran out of memory. {helps}", command(run))]
    if run.outcome == "stopped" and code == ExitCode.OVER_BUDGET:
        more = {"guard.budget_gpu_hours": _rounded(2 * (run.gpu_hours or 1.0))}
        return [Advice("Resume with a larger budget:", command(run, changes=more))]
    if run.outcome == "stopped":
        text = "Resume: the same command continues from the newest checkpoint."
        return [Advice(text, command(run))]
    if run.outcome == "diverged" or code == ExitCode.DIVERGED:
        saved = [step for e in run.of_kind("saved") if (step := number(e.get("step"))) is not None]
        lower = _rounded((number(run.planned("run", "optim", "lr")) or 0.0) / 2)
        if not saved:
            text = "No checkpoint was saved: start again with a lower rate and save.every."
            return [Advice(text, command(run, dir=f"{run.path}-2", changes={"optim.lr": lower}))]
        changes = {"resume.from": f"{run.path}@{int(saved[-1])}", "optim.lr": lower}
        text = "Branch from an earlier checkpoint with a lower rate."
        return [Advice(text, command(run, dir=f"{run.path}-2", changes=changes))]
    if code == ExitCode.CANNOT_SAVE:
        return [Advice("Free disk space, then run the same command again.", command(run))]
    if code == ExitCode.NO_CHECKPOINT:
        return [Advice("Branch from another run's checkpoint, or use a new run.dir.")]
    if code == ExitCode.HANG:
        text = "Read heartbeats/ for the rank that the others waited for; then resume."
        return [Advice(text, f"ls {folder}/heartbeats"), Advice("Resume:", command(run))]
    if run.outcome == "failed":
        return [Advice("Fix the cause above, then resume with the same command.", command(run))]
    if run.is_silent():
        text = "Check whether its job is still running; the same command resumes it."
        return [Advice(text, command(run))]
    if run.outcome == "done":
        if problem := _unready(run):
            return [problem]
        end = f"held-out loss {best[1]:.3f} at step {best[0]:,}" if best else "all steps are done"
        what, tool = "Export the weights", "export_hf.py"
        if (run.path / "export").is_dir():
            what, tool = "Try the model", "chat.py"
        return [Advice(f"{what}: {end}.", f"python {script(f'tools/{tool}')} {folder}")]
    return []


def _unready(run: RunRecord) -> Advice | None:
    """Return advice for a run that has learned too little to be tried; None for others."""
    best, (unigram, _), total = run.best(), _counted(run), run.total_steps
    first, problem = run.evaluations()[:1], _no_better(run)
    is_above = best is not None and unigram is not None and best[1] >= unigram
    if total is None or not (problem or is_above):
        return None
    changes: dict[str, Any] = {"train.steps": max(100, 4 * total)}
    what = f"Train longer: {total:,} steps were too few"
    lr = number(run.planned("run", "optim", "lr"))
    if problem and total >= 100 and lr is not None:  # enough steps: the rate is at fault
        rose = run.evaluations()[-1][1] > first[0][1]
        changes = {"optim.lr": _rounded(lr / 3 if rose else lr * 3)}
        what = f"Train at a {'lower' if rose else 'higher'} rate"
    why = f"a unigram model is better ({unigram:.2f} nats)" if is_above else "it has not improved"
    return Advice(
        f"{what}: {why}, so the model is not worth trying yet.",
        command(run, dir=f"{run.path}-2", changes=changes),
    )


def _by_curve(run: RunRecord) -> list[Advice]:
    """Return advice from the held-out losses."""
    evaluations, best = run.evaluations(), run.lowest()
    total = run.total_steps
    if run.outcome != "done" or len(evaluations) < 3 or best is None or not total or _unready(run):
        return []
    (_, before), (_, last) = evaluations[-2:]
    if last > best[1] * 1.01:
        text = f"The best weights are those of step {best[0]:,}"
        if best[0] in run.saved:
            export = f"python {script('tools/export_hf.py')} {shlex.quote(str(run.path))}"
            return [Advice(f"{text}:", f"{export} --step {best[0]}")]
        return [Advice(f"{text}: save.keep_best keeps them.")]
    if before - last > 0.005 * before and not compares_pairs(run):
        text = (
            f"Held-out loss still fell by {before - last:.3f} in the last evaluation: train longer."
        )
        longer = {"train.steps": 2 * total}
        return [Advice(text, command(run, dir=f"{run.path}-longer", changes=longer))]
    return []


def command(run: RunRecord, dir: str | None = None, changes: dict[str, Any] | None = None) -> str:
    """Return the command that starts the run, with its user's settings and with `changes`; "" if
    plan.json does not record them. `dir`: another run folder.
    """
    source = run.text("deepspeed_source")
    if not source:
        return ""
    values, changes = {}, changes or {}
    origins = run.planned("run_set")
    replaced = LENGTHS if any(key in LENGTHS for key in changes) else ()
    for key, origin in origins.items() if isinstance(origins, dict) else ():
        value = run.planned("run", *key.split("."))
        left_out = ("run.dir", "run.notify", *replaced)  # plan.json has no more than a part of it
        if value is not None and key not in left_out and origin not in DECIDED:
            values[key] = value
    assigned = run.planned("deepspeed_set")
    if isinstance(assigned, dict):
        values |= {f"{PREFIX}{key}": value for key, value in assigned.items()}
    for json_key in (name for key in changes for name in _SAME.get(key, ())):
        if run.planned("deepspeed_given", *json_key.split(".")) is not None:
            values[f"{PREFIX}{json_key}"] = AUTO
    values |= {"run.dir": dir or str(run.path), **changes}
    written = {
        key: value if isinstance(value, str) else value_as_text(_without_none(value))
        for key, value in values.items()
    }
    pairs = " ".join(shlex.quote(f"{key}={text}") for key, text in written.items())
    folder = _started_in(run)
    there = f"cd {shlex.quote(folder)} && " if folder else ""
    return f"{there}{_start(run, folder)} --deepspeed {shlex.quote(source)} {pairs}"


def _start(run: RunRecord, folder: str) -> str:
    """Return the command without its arguments, for the launcher that started the run."""
    launcher, train = run.text("world", "launcher"), script("harness/train.py", folder)
    ranks = max(1, int(number(run.planned("world", "world_size")) or 1))
    per_node = max(1, int(number(run.planned("world", "local_world_size")) or ranks))
    nodes = -(-ranks // per_node)
    if launcher == "none":
        return f"python {train}"
    if launcher == "torchrun":
        where = f'--nnodes={nodes} --node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR" '
        where = where if nodes > 1 else ""
        shares = f"{SHARES_GPU}=1 " if run.ranks_per_gpu > 1 else ""
        return f"{shares}torchrun {where}--nproc-per-node={per_node} {train}"
    if launcher == "slurm":
        gpus = (
            f"--gpus-per-node={-(-per_node // run.ranks_per_gpu)} "
            if run.text("world", "accelerator") == "cuda"
            else ""
        )
        return f"sbatch --nodes={nodes} {gpus}{script('slurm/train.sbatch', folder)}"
    return f"deepspeed {train}"


def _rounded(rate: float) -> float:
    """Return a rate that is only a suggestion, to three digits."""
    return float(f"{rate:.3g}")


def _without_none(value: Any) -> Any:
    """Return a value of plan.json without the keys of its tables that are null: TOML has none."""
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


def progress(run: RunRecord) -> str:
    """Return the steps taken as text: "50 of 100"."""
    total = run.total_steps
    return f"{count(run.step)} of {count(total)}" if total else count(run.step)
