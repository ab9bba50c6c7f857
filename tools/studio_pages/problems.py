"""Problems and remedies: how each problem shows, the events that report it, and its remedy."""

from collections import Counter
from typing import NamedTuple
from urllib.parse import quote

from harness.errors import ExitCode
from tools.studio_app.figures import Figure, Note, Table, numbers
from tools.studio_app.page import Page, Typed, Values
from tools.studio_app.runs import names, read_run


class Problem(NamedTuple):
    """A problem, and what helps."""

    name: str
    sign: str
    events: tuple[str, ...]
    """Kinds of events in events.jsonl that report it."""
    remedy: str
    page: str = ""
    """The page of the studio that explains it."""


PROBLEMS = (
    Problem(
        "Out of memory",
        "the run ends, or --dry-run says that it does not fit",
        ("forced", "out_of_memory"),
        "model.checkpointing=full, a smaller train.micro_batch, a higher ZeRO stage, shorter "
        "data.seq_len, offload; the plan lists which single change makes it fit",
        "plan",
    ),
    Problem(
        "Loss spike",
        "loss or gradient norm 6 standard deviations above the last 128 steps",
        ("spike", "rollback"),
        "guard.spikes=skip or rollback; a lower optim.lr, longer optim.warmup_steps, clipping",
        "schedules",
    ),
    Problem(
        "Loss or gradient is not finite",
        "steps are skipped; after guard.max_bad_steps exit code 76",
        ("skipped_step", "diverged"),
        "a lower optim.lr, bf16 instead of fp16, optim.clip_norm; look at the samples that the "
        "event names with tools/show_batch.py",
        "precision",
    ),
    Problem(
        "fp16 overflows repeatedly",
        "the loss scale falls to its minimum",
        ("skipped_step", "diverged"),
        "bf16 if the GPU has it; otherwise a lower rate and clipping",
        "precision",
    ),
    Problem(
        "Loss does not fall",
        "flat from the first steps on",
        ("no_better", "few_steps", "unfinished_warmup", "unused_weights"),
        "tools/find_lr.py for the rate; tools/show_batch.py shows the trained tokens of each "
        "example; "
        "a smaller train.global_batch or more train.epochs, for more steps",
        "optimizers",
    ),
    Problem(
        "Held-out loss rises while the training loss falls",
        "overfitting",
        ("ended_early",),
        "eval.patience, more data, model.dropout, fewer epochs",
        "sizes",
    ),
    Problem(
        "A hang",
        "no progress for longer than guard.hang_* allows; exit code 78",
        ("hang",),
        "the event names the ranks that others wait for, heartbeats/ has every stack; requeue",
        "runs",
    ),
    Problem(
        "A rank fails",
        "the run ends within seconds with its exit code",
        ("failed",),
        "status.json has the message of the rank that failed first; tools/preflight.py checks "
        "nodes",
        "runs",
    ),
    Problem(
        "Ranks silently differ",
        "weights that should be equal are not; the run ends and saves nothing",
        ("replicas_differ",),
        "a defective GPU or its memory: exclude the node that the event names",
        "data",
    ),
    Problem(
        "A checkpoint is damaged",
        "another one is used; exit code 77 if none is intact",
        ("unusable_checkpoint", "damaged_record"),
        "more of save.keep; check the storage: every byte is verified by SHA-256",
        "runs",
    ),
    Problem(
        "The run stopped by itself",
        "exit code 75: a signal, or the time limit was near",
        ("stopped", "time_limit"),
        "the same command with the same run.dir resumes from the newest checkpoint",
        "runs",
    ),
    Problem(
        "Cannot save",
        "exit code 74: the disk is full or read-only",
        ("failed",),
        "free space, or set save.keep=1; the same command resumes",
        "runs",
    ),
    Problem(
        "The GPUs wait for each other",
        "pipeline stages idle in a large share of the step",
        ("pipeline_bubble",),
        "more micro-batches per step, or fewer stages",
        "pipeline",
    ),
    Problem(
        "A setting of the JSON was changed",
        "the plan changed, adopted or left out a key",
        ("changed", "adopted", "left_out"),
        "the event has the reason; ds.key=value sets it on the command line",
        "plan",
    ),
    Problem(
        "No bfloat16 on this device",
        "the run computes in another precision or attention than asked",
        ("fallback",),
        "set the precision in the JSON, or use a GPU with bf16",
        "precision",
    ),
    Problem(
        "The architecture is unknown to the planner",
        "no estimate; stages are split evenly",
        ("unknown_architecture", "even_split"),
        "tools/estimate_memory.py --trace counts it from its class",
        "memory",
    ),
    Problem(
        "One expert gets most tokens",
        "expert_load_max far above 1",
        (),
        "a larger router_aux_loss_coef in model.overrides",
        "experts",
    ),
)


def figures(values: Values) -> list[Figure]:
    """Return the problems that match a search, with the runs whose events report them."""
    counts = seen_in_runs()
    rows, links = [], []
    for problem in PROBLEMS:
        text = " ".join([*problem[:2], *problem.events, problem.remedy]).lower()
        if not all(word in text for word in values["search"].lower().split()):
            continue
        by_run: Counter[str] = Counter()
        for kind in problem.events:
            by_run.update(counts.get(kind, {}))
        where = ", ".join(f"{name} ({count} x)" for name, count in by_run.most_common(3))
        kinds = ", ".join(problem.events) or "none"
        rows.append((problem.name, problem.sign, kinds, problem.remedy, where))
        first = by_run.most_common(1)
        seen = f"/runs?run={quote(first[0][0], safe='')}" if first else None
        links.append(seen or (f"/{problem.page}" if problem.page else None))
    if not rows:
        return [Note(f"No problem matches {values['search']!r}.")]
    codes = ", ".join(f"{code.value} {code.name.lower().replace('_', ' ')}" for code in ExitCode)
    return [
        numbers(("Problems", str(len(rows)), f"of {len(PROBLEMS)}")),
        Table(
            "Problems and remedies; a name leads to a run in which it was seen, or to its page",
            "problem|how it shows|events|remedy|seen in",
            rows,
            links,
        ),
        Note(f"Exit codes: {codes}; any other is a crash."),
    ]


def seen_in_runs() -> dict[str, Counter[str]]:
    """Return how often each run has an event, by the event's kind."""
    counts: dict[str, Counter[str]] = {}
    for name in names()[:60]:
        run = read_run(name)
        for event in run.records.events if run else ():
            counts.setdefault(str(event["kind"]), Counter())[name] += 1
    return counts


SEARCH = Typed("search", "Search, as in: spike, memory, fp16, hang", "")
PAGE = Page("problems", (SEARCH,), figures)
