"""Each page's function, without a browser: its settings, its figures, and their sources."""

import functools
import gc
import html
import itertools
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

from harness.config.ds_json import load_ds_json
from harness.config.run_file import load_run_config
from harness.estimate.activations import activations
from harness.estimate.fit import with_stage
from harness.layout.world import World
from harness.plan.duration import step_time
from harness.plan.make import make_plan
from harness.report.chart import Chart
from tests.tables import beside
from tests.tiers import rest_in_gate
from tools.studio_app import page as page_module
from tools.studio_app.figures import Bars, Code, Drawing, Figure, Table, html_of
from tools.studio_app.lessons import PAGES
from tools.studio_app.page import Choice, Page, Slider, Typed, not_shown, query_of, read_values
from tools.studio_app.svg import WIDTH, Svg
from tools.studio_app.view import figures_of as shown_by
from tools.studio_app.view import home_of, lesson_of
from tools.studio_pages import hybrid
from tools.studio_pages.checkpointing import _inputs, kept_bytes, passes
from tools.studio_pages.cleaning import cleaned, trade_off
from tools.studio_pages.data import trained_step
from tools.studio_pages.sizes import loss, optimum
from tools.studio_pages.tensor import multiplied, parts_of
from tools.studio_pages.tokenizers import operations
from tools.studio_pages.zero import inputs_of, traffic

ROOT = Path(__file__).parents[2]
TABLES = beside(__file__, "pages.toml")
BY_SLUG = {page.slug: page for page in PAGES}
every_page = pytest.mark.parametrize("page", PAGES, ids=list(BY_SLUG))


def figures_of(slug: str, **query: str) -> list[Figure]:
    page = BY_SLUG[slug]
    return page.figures(read_values(page.controls, query))


def command_of(slug: str, **query: str) -> list[str]:
    """Return the words of a page's command."""
    titled = (f for f in figures_of(slug, **query) if isinstance(f, Code))
    text = next(f.text for f in titled if f.title == "Train with these settings")
    return text.replace("\\\n", "").split()


def picture(figures: list[Figure]) -> str:
    """Return the drawing of a page."""
    return next(figure.svg for figure in figures if isinstance(figure, Drawing))


def number(figures: list[Figure], label: str) -> str:
    """Return the text of the figure with a label."""
    return next(n.text for f in figures for n in getattr(f, "numbers", ()) if n.label == label)


@every_page
def test_control_defaults_and_query_values_round_trip(page: Page) -> None:
    """Nonsense in an address is the default."""
    last: dict[str, Any] = {}
    for control in page.controls:
        name = control.name
        nonsense = {"<script>": control.default}
        match control:
            case Slider():
                last[name], nonsense["nan"] = control.values[-1], control.default
                nonsense["-1e999"] = control.values[0]
                assert control.default in control.values, name
                assert list(control.values) == sorted(control.values), name
                if 1 in control.values and re.fullmatch(r"[\w-]+s", control.unit):
                    assert control.one, f"1 {control.unit}"
            case Choice():
                last[name] = control.options[-1]
                assert control.default in control.options, name
            case Typed():
                last[name], nonsense = "a & b = <c>", {}
                assert len(control.default) <= control.most
        for text, value in nonsense.items():
            assert read_values(page.controls, {name: text})[name] == value
            assert not_shown(page.controls, {name: text, "y": ""})[1:], "nothing says so"
    assert read_values(page.controls, query_of(page.controls, last)) == last
    assert not_shown(page.controls, query_of(page.controls, last)) == []
    assert query_of(page.controls, read_values(page.controls, {})) == {}


def test_home_page_lists_pages_in_lesson_order() -> None:
    files = {path.stem for path in (ROOT / "tools/studio_pages").glob("[!_]*.py")}
    links = re.findall(r'<a href="/([a-z0-9]+)">', home_of(PAGES))
    assert links == [page.slug for page in PAGES]
    assert sorted(links) == sorted(files)
    order = ["Data", "Memory", "Precision", "Parallelism", "Optimization", "Monitoring"]
    groups = dict.fromkeys(lesson.group for lesson in page_module.LESSONS.values())
    assert list(page_module.ABOUT) == list(groups) == order


@every_page
def test_page_has_text_command_and_resolvable_functions(page: Page) -> None:
    lesson = page.lesson
    assert lesson.formula.endswith(".")
    assert lesson.sources
    assert all(address.startswith("https://") for _, address in lesson.sources)
    for text in (lesson.sees, lesson.tries, lesson.means):
        assert text.endswith(".")
        assert 40 < len(text) < 330
        assert html.escape(text) in lesson_of(page)
    words = shlex.split(lesson.command)
    (program, *_) = (word for word in words if word.endswith((".py", ".sbatch")))
    files = [program, *(word for word in words if word.startswith("ds_configs/"))]
    assert all((ROOT / file).is_file() for file in files)
    if "--deepspeed" in words:
        set_keys = [word for word in words if re.match(r"(model|train|data|optim)\.", word)]
        load_run_config(None, set_keys)
    assert lesson.computed_by
    assert all(callable(resolve_name(name)) for name in lesson.computed_by)


_RECT = re.compile(r'<rect x="(\S+)" y="(\S+)" width="(\S+)" height="(\S+)"')


@pytest.mark.parametrize("ends", ["", pytest.param("ends", marks=pytest.mark.gate("pages"))])
@every_page
def test_figures_are_finite_and_fill_their_axes(page: Page, ends: str) -> None:
    """With the defaults, and at both ends of every slider, or those are answered."""
    defaults = read_values(page.controls, {})
    sliders = [control for control in page.controls if isinstance(control, Slider)]
    edges = [{slider.name: slider.values[end]} for slider in sliders for end in (0, -1)]
    figures = [f for edge in (edges if ends else [{}]) for f in shown_by(page, defaults | edge)]
    assert figures or not edges
    for figure in figures:
        assert not re.search(r"\b(nan|NaN|inf|Infinity)\b", html_of(figure)), figure
        if isinstance(figure, Chart) and figure.x_range:
            assert figure.x_range[1] >= max(max(curve.x["x"]) for curve in figure.curves)
        if isinstance(figure, Chart) and figure.y_range:
            lines = [*(curve.y for curve in figure.curves), [y for _, y in figure.limits]]
            assert 0.9 < max(itertools.chain(*lines)) / figure.y_range[1] <= 1, figure.title
        for picture in getattr(figure, "svg", "").split("<svg ")[1:]:
            height = float(picture.split('"')[1].split()[3])
            boxes = [[*map(float, box)] for box in _RECT.findall(picture)]
            assert all(min(x, y) >= 0 for x, y, _, _ in boxes)
            assert all(x + w < WIDTH + 0.02 and y + h < height + 0.02 for x, y, w, h in boxes)
            assert max((x + w for x, _, w, _ in boxes), default=WIDTH) > 0.95 * WIDTH


@pytest.mark.parametrize("slug", BY_SLUG)
def test_a_page_calls_every_function_that_it_names(slug: str, monkeypatch, tmp_path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first/metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    monkeypatch.setattr("tools.studio_app.runs._roots", [tmp_path])
    rooms = ("tools.", "harness.estimate.")
    for each in gc.get_objects():  # results that other tests have computed
        if type(each) is functools._lru_cache_wrapper and each.__module__.startswith(rooms):
            each.cache_clear()
    called = set[Any]()
    before = sys.getprofile()
    sys.setprofile(lambda frame, *_: called.add(frame.f_code))
    try:
        figures_of(slug, **TABLES["asked"].get(slug, {}))
    finally:
        sys.setprofile(before)
    places = {f"{code.co_filename.removesuffix('.py')}.{code.co_qualname}." for code in called}
    here = {place.removeprefix(f"{ROOT}/").replace("/", ".") for place in places}
    for name in BY_SLUG[slug].lesson.computed_by:
        assert any(each.startswith(f"{name}.") for each in here), name


@pytest.mark.parametrize(
    ("query", "keys"),
    rest_in_gate("pages", map(tuple, TABLES["options"])),
    ids=lambda values: "-".join(values),
)
def test_options_are_planned_as_by_the_command(query: dict[str, str], keys: dict[str, Any]) -> None:
    """The page's memory, time and command, against the plan that the command makes."""
    defaults = {"model.name": "llama-3-8b", "data.seq_len": 4096, "train.micro_batch": 1}
    words = [f"{key}={value}" for key, value in (defaults | keys).items()]
    words = [word.replace("tools/", f"{ROOT}/tools/") for word in words]
    ds, problems = load_ds_json(ROOT / "ds_configs/zero3.json", ["gradient_accumulation_steps=8"])
    assert not problems
    world = World(world_size=64, local_world_size=8, accelerator="cuda", gpu="h100-sxm")
    plan = make_plan(load_run_config(None, words), ds, world, estimating=True)
    step = step_time(plan)
    assert plan.estimate is not None
    assert step is not None
    shown = figures_of("plan", **query)
    peak = f"{plan.estimate.worst.peak / 2**30:,.2f} GiB"
    assert number(shown, "Peak on a GPU") == peak
    assert number(shown, "A step") == f"{step.seconds:,.2f} s"
    assert number(figures_of("memory", **query), "Peak on a GPU") == peak
    labels = ("Peak on a GPU", "A step")
    plain = figures_of("plan")
    assert [number(plain, of) for of in labels] != [number(shown, of) for of in labels]
    for page, more in (("plan", {"train.tokens": "256e9"}), ("memory", {})):
        words = command_of(page, **query)
        booked = ["--nodes=8", "--gpus-per-node=8", "--exclusive", "--mem=0"]
        assert words[:6] == ["sbatch", *booked, "slurm/train.sbatch"]
        load_run_config(None, [word for word in words[8:] if not word.startswith("ds.")])
        for key, value in (keys | more).items():
            text = "FOLDER_OF_ITS_WEIGHTS" if key == "model.init_from" else value
            assert f"{key}={text}" in words


def test_commands_follow_the_controls_of_their_page() -> None:
    assert "model.checkpointing=4" in command_of("checkpointing", way="every N-th layer", every="4")
    words = command_of("hybrid", stages="2", tensor="4", nodes="2")
    assert words[:2] == ["sbatch", "--nodes=2"]
    assert {"ds.pipeline.stages=2", "ds.tensor_parallel.autotp_size=4"} <= {*words}


def test_precision_and_positions_are_controls_of_these_pages() -> None:
    label = "Peak on a GPU"
    in_fp32 = figures_of("memory", precision="fp32")
    assert number(in_fp32, label) != number(figures_of("memory"), label)
    for slug in ("memory", "plan", "zero", "hybrid"):
        assert figures_of(slug, seq_len="16384", context="16384")


@pytest.mark.gate("pages")
def test_layouts_are_ranked_with_the_options_of_the_model() -> None:
    def ranking(**query: str) -> Any:
        figures = figures_of("plan", compare="every layout, ranked", gpus="8", **query)
        return next(f for f in figures if "layouts of" in getattr(f, "title", ""))

    plain = ranking()
    assert ranking(lora="16").rows != plain.rows
    assert ranking(attention="eager").rows != plain.rows


@pytest.mark.gate("pages")
@pytest.mark.parametrize("slug", ["memory", "plan", "zero", "hybrid", "checkpointing"])
def test_a_family_that_is_traced_has_a_page(slug: str) -> None:
    """Its tensors are in no table: the page takes them from the trace, as train.py does."""
    figures = figures_of(slug, model="smollm3-3b", seq_len="1024", micro_batch="1")
    assert any(isinstance(figure, Chart | Bars) for figure in figures)


def test_the_command_with_a_json_of_ones_own_is_that_of_the_plan() -> None:
    for own_json, steps in (('{"gradient_accumulation_steps": 4}', 4), ("{}", 8)):
        command = command_of("plan", own_json=own_json, accumulation="8", precision="fp16")
        assert "ds_configs/own.json" in command
        own = [word for word in command if word.startswith("ds.")]
        assert own == [f"ds.gradient_accumulation_steps={steps}"]


def test_own_json_is_planned_and_its_mistakes_are_shown() -> None:
    zero_1 = '{"zero_optimization": {"stage": 1}}'
    own = number(figures_of("plan", own_json=zero_1), "Peak on a GPU")
    assert own != number(figures_of("plan", json="zero2"), "Peak on a GPU")
    page, text = BY_SLUG["plan"], ""
    for own_json in ("{", "[1]", "[" * 100_000, '{"zero_optimization": {"stagee": 1}}'):
        (note, *_) = shown_by(page, read_values(page.controls, {"own_json": own_json}))
        assert getattr(note, "verdict", None) == "bad", own_json[:20]
        text = getattr(note, "text", "")
    assert "did you mean zero_optimization.stage?" in text


@pytest.mark.parametrize(("slug", "query", "words"), TABLES["too_far"])
def test_slider_too_far_names_itself(slug: str, query: dict[str, str], words: list[str]) -> None:
    page = BY_SLUG[slug]
    notes = [getattr(f, "text", "") for f in shown_by(page, read_values(page.controls, query))]
    assert all(word in notes[0] for word in words), notes
    assert "(default)" not in notes[0]
    assert str(ROOT) not in notes[0]


def test_the_best_trade_offs_are_marked() -> None:
    scores = trade_off([cleaned(strictness) for strictness in range(0, 101, 5)])
    text, sizes = read_values(BY_SLUG["tokenizers"].controls, {})["text"], (512, 1024, 2048, 4096)
    best = {
        "cleaning": max(scores, key=lambda pair: pair[1])[0],
        "tokenizers": min(sizes, key=lambda n: operations("BPE", n, text, 4096)),
    }
    for slug, place in best.items():
        marks = [mark for figure in figures_of(slug) for mark in getattr(figure, "marks", ())]
        assert [mark.x["x"] for mark in marks] == [place]


@pytest.mark.gate("pages")
def test_experts_are_balanced_within_the_shown_steps() -> None:
    """Without the balancing loss, they are not."""
    assert float(number(figures_of("experts"), "Busiest expert").split()[0]) < 1.5
    assert float(number(figures_of("experts", balance="0"), "Busiest expert").split()[0]) > 2


def test_the_last_step_of_a_schedule_has_its_label() -> None:
    chart = figures_of("schedules", steps="300")[0]
    assert isinstance(chart, Chart)
    assert re.search(r'<span style="left:100.00%" class=last>300</span>', html_of(chart))


def test_one_micro_batch_is_on_one_device_at_a_time() -> None:
    way = [number(figures_of("layers", progress=str(at)), "Now") for at in range(0, 101, 4)]
    there = ["device 0", "device 1", "device 2", "device 3"]
    assert list(dict.fromkeys(way)) == there
    changes = [now for now, before in zip(way[1:], way, strict=False) if now != before]
    assert changes == there[1:] + there[2::-1]
    assert number(figures_of("layers"), "Waiting") == "75%"


def test_a_divided_product_is_the_whole_one() -> None:
    for ranks, kind in itertools.product((1, 2, 8), ("MLP", "attention")):
        y, parts, gradient, gradients = multiplied(256, ranks, 3, kind, heads=8)
        assert len(parts) == ranks
        torch.testing.assert_close(parts.sum(0), y, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(gradients.sum(0), gradient, rtol=1e-4, atol=1e-5)
    assert parts_of(4096, 2) == [((0, 2048), (0, 2048)), ((2048, 4096), (2048, 4096))]


def test_gradients_of_all_ranks_are_those_of_one() -> None:
    for ranks, samples, micro_batch in ((4, 16, 2), (3, 8, 4), (8, 8, 4)):
        step = trained_step(ranks, samples, micro_batch)
        assert sorted(n for of_rank in step.samples for n in of_rank) == list(range(samples))
        torch.testing.assert_close(step.reduced, step.whole)
        again = trained_step.__wrapped__(ranks, samples, micro_batch)
        assert torch.equal(again.whole, step.whole)
    figures = figures_of("data")
    assert float(number(figures, "Difference")) < 1e-6
    assert float(number(figures, "Mean of means").removesuffix("% off")) > 1
    frames = [picture(figures_of("data", frame=str(frame))) for frame in range(1, 6)]
    start, read, computed, reduced, stepped = (svg.count("<rect") for svg in frames)
    assert start < read == stepped < computed == reduced  # gradients are drawn in two of them


def test_traffic_of_the_stages_is_that_of_the_engine() -> None:
    """2 x and 3 x the parameters for stages 0 and 3 (arXiv 1910.02054, section 7)."""
    inputs, _ = inputs_of(read_values(BY_SLUG["zero"].controls, {"accumulation": "1"}))
    inputs = replace(inputs, zero=replace(inputs.zero, comm_bytes=2))
    psi = 2 * inputs.parameters * 7 / 8
    for batches, expected in ((1, [2, 3, 3, 3]), (4, [2, 3, 9, 12])):
        each = replace(inputs, grad_accum=batches)
        totals = [sum(traffic(with_stage(each, stage))) / psi for stage in range(4)]
        assert totals == pytest.approx(expected)
    assert 12.9e9 < inputs.parameters < 13.1e9


def test_checkpointing_holds_what_autograd_saves() -> None:
    """The sum over the layers equals the estimate, which is compared with real models elsewhere."""
    controls = BY_SLUG["checkpointing"].controls
    for way in ("none", "selective", "full", 3, "reversible"):
        inputs = _inputs(read_values(controls, {}), way)  # type: ignore[arg-type]
        kinds = ("layer inputs", "kept results", "attention", "mlp", "norms", "layers")
        names = {f"activations: {kind}" for kind in kinds}
        parts = [p for p in activations(inputs) if p.component in names and "loss" in p.phases]
        assert sum(kept_bytes(inputs)) == pytest.approx(sum(p.bytes for p in parts), rel=1e-6)
        turns = passes(inputs)  # what a layer computes again is held besides
        assert all(again.bytes >= turns[again.layer].bytes for again in turns if not again.forward)
    values = {"activation_offload": "host memory", "model": "llama-1b"}
    inputs = _inputs(read_values(controls, values), "full")
    assert set(kept_bytes(inputs)) == {0}, "checkpointed layers keep nothing on the device"
    host = number(figures_of("checkpointing", way="full", **values), "In host memory")
    layers, width, tokens = inputs.shape.num_layers, inputs.shape.hidden_size, inputs.tokens
    assert host == f"{2 * layers * width * tokens / 2**30:,.2f} GiB"


def test_a_rank_is_where_the_grid_says() -> None:
    shown = figures_of("hybrid", rank="5")
    (rank,) = (n for f in shown for n in getattr(f, "numbers", ()) if n.label == "Rank")
    assert rank.note == "data 1, pipeline 0, tensor 1"
    assert number(shown, "Its tensor group") == "4, 5, 6, 7"
    # On all nodes, the sliders lead to the last rank and to no division that is impossible.
    for slider in BY_SLUG["hybrid"].controls:
        for size in getattr(slider, "values", ()) if slider.name in ("stages", "tensor") else ():
            shown = figures_of("hybrid", nodes="99", rank="999", **{slider.name: str(size)})
            assert (number(shown, "Ranks"), number(shown, "Rank")) == ("128", "127")


def test_shown_numbers_agree_with_their_formulas() -> None:
    for name in ("1F1B", "GPipe", "interleaved 1F1B", "zero-bubble (ZB-H1)"):
        shown = figures_of("pipeline", schedule=name)
        assert number(shown, "Bubble, formula") == number(shown, "Waiting"), name
    assert number(figures_of("layers"), "A single device") == "18.42 GiB"  # one tied embedding
    (states,) = (f for f in figures_of("optimizers", model="llama-3-8b") if isinstance(f, Table))
    gib = {row[0]: row[2] for row in states.rows}
    assert (gib["adamw"], gib["muon"]) == ("59.83", "33.83")  # AdamW steps embedding and head


def test_a_loss_scale_saves_what_fp16_would_lose() -> None:
    def lost(**query: str) -> float:
        return float(number(figures_of("precision", **query), "Lost in fp16").rstrip("%"))

    assert lost(tokens="0.001") > lost(tokens="0.001", scale="8") > lost(tokens="0.001", scale="16")
    table = figures_of("precision", number="0.1")[3]
    assert [row[1] for row in table.rows] == ["0.1000000015", "0.1000976562", "0.09997558594"]  # type: ignore[union-attr]


def test_chinchilla_fit_matches_the_paper() -> None:
    """Chinchilla's own size and tokens; arXiv 2203.15556, section 3.3, gives the constants."""
    assert loss(70e9, 1.4e12) == pytest.approx(1.69 + 0.0835 + 0.1634, abs=2e-3)
    parameters, tokens = optimum(6 * 70e9 * 1.4e12)
    assert (parameters, tokens) == pytest.approx((70e9, 1.4e12))


def test_bars_and_arrows_are_drawn_as_asked() -> None:
    for together, width in ((True, "38.00"), (False, "19.00")):
        drawn = html_of(Bars("", "", ["a", "b"], {"c": [1, 2], "d": [3, 4]}, together=together))
        assert re.findall(r";width:([\d.]+)%", drawn) == [width] * 4
        (svg := Svg(9, "")).line([(0, 0), (1, 1)], arrow=together)
        assert ("<polygon" in str(svg)) == together


def test_a_moment_of_a_step_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The picture and its position follow the slider and the schedule."""
    shown = [figures_of("hybrid", moment=str(place)) for place in (0, 12, 23, 97, 100)]
    pictures = {*map(picture, shown)}
    assert len(pictures) == len(shown)
    assert number(shown[-1], "Moment") == "68 of 68"
    monkeypatch.setattr("tools.layout.schedules.schedule", lambda stages, _: [[None]] * stages)
    assert number(figures_of("hybrid", moment="100"), "Moment") == "5 of 5"
    plans = []
    monkeypatch.setattr(hybrid, "step_time", lambda plan: plans.append(plan) or step_time(plan))
    assert number(figures_of("hybrid"), "A step") == f"{step_time(plans[0]).seconds:,.2f} s"
