"""Plan a run: does it fit, how long does it take, which layout is quickest."""

import json
from argparse import Namespace
from functools import lru_cache

from harness.estimate.step_time.job import Job
from harness.estimate.step_time.step import TERMS, StepTime
from harness.layout.shape import num_parameters
from harness.plan.duration import step_time
from harness.plan.plan import NOT_TRAINED, Plan
from harness.report.chart import colour_of, strip
from harness.report.formatting import gib
from tools.cluster.ask import question_of
from tools.cluster.choose import why_not
from tools.cluster.search import answer
from tools.studio_app import plans
from tools.studio_app.figures import Code, Drawing, Figure, Note, Table
from tools.studio_app.page import Choice, Page, Slider, Typed, Values, powers_of_two
from tools.studio_pages.memory import by_phase, numbers_of

_THIS, _ALL = "this JSON", "every layout, ranked"
_NOT_ASKED = (
    *("gpus_per_node", "network", "host_memory", "disk"),
    *("price", "budget", "init_from", "quantize", "measured", "rates"),
)
"""Options of tools/plan_cluster.py that the page leaves to their defaults."""


def figures(values: Values) -> list[Figure]:
    """Return the verdict, the time, the memory by phase, the layouts, the JSON and the command."""
    plan = plans.planned(values, json_text=values["own_json"])
    estimate, step = plans.estimate_of(plan), step_time(plan)
    assert step is not None, "every GPU and preset of the page is known"
    events = [event for event in plan.events if "message" in event]
    run = values
    if values["own_json"].strip():  # the plan follows its keys, not the controls
        own = {"json": "own", "accumulation": plan.grad_accum, "precision": plans.PRECISION.default}
        run = {**values, **own}
    shipped = (plans.ROOT / "ds_configs" / f"{values['json']}.json").read_text(encoding="utf-8")
    return [
        numbers_of(estimate, *_time(step, plan, values["tokens"])),
        *(
            Note(f"train.py would reject this: {event['message']}", "bad")
            for event in events
            if event["kind"] == NOT_TRAINED
        ),
        by_phase(estimate),
        spent(step),
        *([_ranked(values, plan.global_batch)] if values["compare"] == _ALL else []),
        Code("Train with these settings", plans.train_command(run)),
        Code("Its DeepSpeed JSON", values["own_json"] or shipped),
        Code("The JSON as DeepSpeed gets it", json.dumps(plan.deepspeed, indent=2)),
        *(Note(event["message"]) for event in events if event["kind"] != NOT_TRAINED),
    ]


def _time(step: StepTime, plan: Plan, billions: int) -> list[tuple[str, ...]]:
    """Return the speed, and the length of the whole job."""
    steps, gpus = billions * 1e9 / step.tokens, plan.world.world_size
    job = Job(steps * step.seconds, gpus, step.machine.watts)
    count = num_parameters(step.inputs.shape)
    hours = f"{job.gpu_hours:,.0f} GPU-hours, {job.days_with_failures:,.1f} days with failures"
    return [
        ("Parameters", f"{count / 1e9:,.2f} billion", f"{count:,}, {plan.precision}"),
        ("A step", f"{step.seconds:,.2f} s", f"{step.tokens:,} tokens; most: {step.bound}"),
        ("Speed", f"{step.tokens_per_s_per_gpu:,.0f}", "tokens/s per GPU"),
        ("MFU", f"{step.mfu:.1%}", f"estimated; rates: {step.machine.evidence}"),
        ("Days", f"{job.days:,.2f}", hours),
        ("Steps", f"{steps:,.0f}", f"{billions:,} billion tokens"),
    ]


def spent(step: StepTime) -> Drawing:
    """Return the parts of a step's time as a bar."""
    parts = {TERMS[name]: seconds for name, seconds in step.terms.items() if seconds > 0}
    colours = {name: colour_of(place) for place, name in enumerate(parts)}
    texts = {name: f"{size / step.seconds:.1%} {size:.3g} s" for name, size in parts.items()}
    return Drawing("Where a step's time goes", strip(parts, colours, texts))


def _ranked(values: Values, global_batch: int) -> Table:
    settings = plans.settings_of(values)
    words = [f"model.{key}={settings[key]}" for key in ("attention", "context") if key in settings]
    job = (values[name] for name in ("model", "gpu", "gpus", "seq_len"))
    return _ranking(*job, global_batch, values["tokens"], values["lora"], tuple(words))


@lru_cache(maxsize=16)
def _ranking(
    model: str, gpu: str, gpus: int, seq_len: int, global_batch: int, billions: int, lora: int,
    words: tuple[str, ...],
) -> Table:  # fmt: skip
    """Return the best layout of each way to divide the job, as tools/plan_cluster.py chooses it."""
    args = Namespace(
        model=plans.name_of(model), gpus=gpus, gpu=gpu, seq_len=seq_len, global_batch=global_batch,
        data_tokens=billions * 1e9, lora=lora or None, assignments=list(words), kernels=(),
        **dict.fromkeys(_NOT_ASKED),
    )  # fmt: skip
    question = question_of(args)
    answered = answer(args, question)
    rows = [
        (
            each.layout.text,
            f"{each.time.seconds:,.2f}",
            f"{each.time.mfu:.1%}",
            f"{question.job(each).days:,.1f}",
            gib(each.peak_interval[1]),
            why_not(each, answered.best),
        )
        for each in answered.ways.values()
    ]
    counted = len(answered.counted)
    title = f"{counted:,} layouts of {global_batch:,} samples per step; the best of each way"
    return Table(title, "layout|s per step|MFU|days|at most|verdict", rows)


PAGE = Page(
    "plan",
    (
        *plans.PLAN_CONTROLS,
        Slider("tokens", "Tokens to train on", powers_of_two(1, 16384), 256, "billion"),
        Choice("compare", "Layouts", (_THIS, _ALL), _THIS),
        Typed("own_json", "Your own DeepSpeed JSON, in place of a shipped one", "", 8_000, lines=4),
    ),
    figures,
)
