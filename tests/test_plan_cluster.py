"""The cluster planner: it counts what train.py plans, and explains why layouts lose."""

import json
import os
import shlex
import subprocess
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from harness.config.run_config import RunConfig
from harness.config.run_file import load_run_config
from harness.errors import ConfigError
from harness.estimate.hardware import find_gpu
from harness.estimate.memory_item import GIB
from harness.estimate.step_time.calibration import Site
from harness.estimate.step_time.step import estimate_time
from harness.estimate.timeline import estimate_memory
from harness.layout.world import World
from harness.plan.command import Command, parse_command, plan_from
from harness.plan.duration import job_of, step_time
from harness.plan.fine_tuning import continued_rate
from harness.plan.machine import cluster
from harness.plan.make import make_plan
from harness.run.dry_run import dry_run
from tests.real_runs import REPOSITORY
from tests.run_tools import run_tool
from tests.tables import beside
from tests.tiers import rest_in_gate
from tools.cluster import choose, search
from tools.cluster.ask import plan_of, question_of
from tools.cluster.choose import ASKED, Answer, answer_of, risk, seconds_within, way_of, why_not
from tools.cluster.count import Counted, Question
from tools.cluster.layouts import STATES, Layout, base_json, layouts
from tools.cluster.search import Memo, count, count_all
from tools.cluster.search import answer as answer_to
from tools.cluster.what_if import Spent, _changes, _spent, front_of, largest_micro_batch
from tools.plan_cluster import make_parser

SMALL = ("--model", "gpt2-124m", "--gpus", 4, "--gpu", "a100-40", "--seq-len", 1024)
JOB = (*SMALL, "--global-batch", 64)
TABLES = beside(__file__, "plan_cluster.toml")


def rows_of(table: str, keep: int) -> list[Any]:
    """Return the rows of a table, all but the first `keep` of them marked for the gate."""
    return rest_in_gate("plan", map(tuple, TABLES[table]), keep)


def arguments(*words: object) -> Any:
    return make_parser().parse_intermixed_args([*map(str, words)])


def job(model: str, gpus: int, gpu: str, seq_len: int, batch: int) -> tuple[Any, Question]:
    words = ("--model", model, "--gpus", gpus, "--gpu", gpu, "--seq-len", seq_len)
    args = arguments(*words, "--global-batch", batch)
    return args, question_of(args)


def answer(*words: object) -> dict[str, Any]:
    return json.loads(run_tool("plan_cluster", *words, "--json").stdout)


@pytest.fixture(scope="module")
def planned() -> dict[str, Any]:
    return answer(*JOB, "--price", 2)


def test_planner_json_rows_are_complete_and_sorted(planned: dict[str, Any]) -> None:
    rows = planned["layouts"]
    fit = [row for row in rows if row["fits"]]
    assert rows[: len(fit)] == fit
    rates = [row["tokens_per_s_per_gpu"] for row in fit[1:]]
    assert rates == sorted(rates, reverse=True)
    quickest = rows[planned["quickest_on_paper"]]
    assert quickest["step_time_s"] == min(row["step_time_s"] for row in fit if row["trained"])
    assert rows[0]["step_time_s"] <= quickest["step_time_s_within"][1]
    assert rows[0]["peak_gib"][1] <= 0.95 * 40
    assert planned["counted"] == len(rows) > 200
    for row in rows:
        assert row["peak_gib"][0] <= row["peak_gib"][1]
        assert min(row["step_time_s"], row["mfu"], row["cost"]) > 0
        assert row["mfu"] < 1
        assert sum(row["terms_s"].values()) == pytest.approx(row["step_time_s"], rel=0.01)
    assert not rows[0]["why_not"]
    assert all(row["why_not"] for row in rows[1:])


def test_rates_of_another_gpu_or_precision_are_refused(tmp_path: Path) -> None:
    site, preflight = tmp_path / "site.json", tmp_path / "preflight.json"
    Site("a100-40", "bf16", 0, {"products": 0.5}, 4, 0.1).write(site)
    rates = {"gpu": "NVIDIA A100-SXM4-40GB", "precision": "bf16", "nodes": 1, "ranks": 4}
    rates |= {"matmul_tflops": 200.0, "all_reduce_gb_per_s": 200.0, "within_node_gb_per_s": None}
    preflight.write_text(json.dumps({"rates": rates}))
    usual = question_of(arguments(*JOB)).machine
    for flag, path in (("--rates", site), ("--measured", preflight)):
        assert question_of(arguments(*JOB, flag, path)).machine.products != usual.products
        with pytest.raises(ConfigError, match=f"{flag} .* on a100-40 in bf16, but this is h200"):
            question_of(arguments(*JOB, "--gpu", "h200", flag, path))
        changes = {change.gpu: change for _, change in _changes(arguments(*JOB, flag, path))}
        assert (changes["a100-40"].rates or changes["a100-40"].measured) == path
        assert changes["h200"].rates is changes["h200"].measured is None
    preflight.write_text(json.dumps({"rates": {**rates, "gpu": None, "precision": "fp32"}}))
    with pytest.raises(ConfigError, match="measured on cpu in fp32"):
        question_of(arguments(*JOB, "--measured", preflight))


def test_counted_layout_memory_equals_the_plan() -> None:
    """One of each ZeRO stage, offload, set of axes and checkpointing mode, for a dense model and a
    mixture, on numbers of GPUs that are not powers of two.
    """
    for model, gpus, step in (("gpt2-124m", 6, 6), ("mixtral-8x7b", 4, 13)):
        words = ("--gpus", gpus, "--gpus-per-node", gpus, "--gpu", "a100-40", "--seq-len", 1536)
        more = () if model != "gpt2-124m" else ("model.overrides.n_positions=1536",)
        args = arguments("--model", model, *words, "--global-batch", 36, *more)
        question = question_of(args)
        shape = question.some.shape
        kinds: dict[object, Layout] = {}
        for layout in layouts(shape, gpus, gpus, 1536, 36, lora=False):
            kinds.setdefault((layout.way, layout.checkpointing), layout)
        assert len(kinds) > 40
        for layout in [*kinds.values()][::step]:
            plan, (counted,) = plan_of(args, layout, question.run), count(question, [layout])
            assert plan.estimate is not None
            assert counted.memory.worst.peak == plan.estimate.worst.peak, layout.text
            assert plan.grad_accum == counted.memory.inputs.grad_accum


@pytest.mark.parametrize(("axes", "way"), TABLES["ways"])
def test_layouts_are_named_by_what_they_divide(axes: dict[str, Any], way: str) -> None:
    layout = Layout(3, "none", 1, 1, 1, 1, 1, "none")
    assert way_of(replace(layout, **axes)) == way


def test_only_zero_3_leaves_sizes_to_the_model() -> None:
    for zero in (1, 2, 3):
        section = base_json((zero, "none", False))["zero_optimization"]
        assert ("reduce_bucket_size" in section) == (zero == 3)


def test_missing_bytes_are_those_of_the_peak_that_was_judged() -> None:
    question = replace(question_of(arguments(*JOB)), device_bytes=2**30)
    layout = Layout(1, "none", 1, 1, 1, 1, 8, "none")
    (counted,) = count(question, [layout])
    assert counted.fits is False  # by its bounds
    assert counted.missing_bytes == counted.peak_bytes - 2**30
    within = replace(question, device_bytes=(counted.peak_bytes) * 21 // 20)
    (judged,) = count(within, [layout])
    assert judged.fits_by_bounds is None
    judged.fits = False  # by the allocator's model
    assert judged.missing_bytes == max(0, judged.peak_interval[1] - within.device_bytes)


def test_layouts_include_factors_other_than_powers_of_two() -> None:
    shape = question_of(arguments(*JOB)).some.shape
    every = [*layouts(shape, 24, 8, 1024, 576, lora=False)]
    assert {each.pipeline for each in every} >= {3, 6, 12}
    assert {each.micro_batch for each in every} >= {3, 6, 9}
    assert {each.checkpointing for each in every} == {"none", "selective", "full", 2, 4}
    assert {each.state for each in every} == {*STATES}
    assert {each.way for each in every if each.hpz} == {(3, "none", True, 1, 1, 1, 1)}
    assert {each.zero for each in every if each.pipeline > 1} == {1}
    assert max(each.tensor for each in every) <= 8
    fixed = {"micro_batch": 6, "checkpointing": 3, "activation_offload": False, "mlp_tiles": 4}
    own = [*layouts(shape, 24, 8, 1024, 576, lora=False, fixed=fixed)]
    assert {each.way for each in own} == {each.way for each in every}
    assert all(vars(each).items() >= fixed.items() for each in own)
    assert len({*own}) == len(own)
    adapters = [*layouts(shape, 24, 8, 16384, 576, lora=True)]
    assert {each.sequence for each in adapters} >= {1, 2, 4}
    axes = {(each.pipeline, each.tensor, each.expert, each.mlp_tiles) for each in adapters}
    assert axes == {(1, 1, 1, 1), (1, 1, 1, 8)}  # long rows are tried in tiles


def test_states_that_the_optimizer_does_not_support_are_left_out() -> None:
    args = arguments(*JOB, "optim.name=adam8bit")
    every = count_all(args, question_of(args))
    assert {(each.layout.zero, each.layout.offload) for each in every} == {
        *((1, "none"), (2, "none"), (3, "none"))
    }


@pytest.mark.gate("plan")
def test_ten_thousand_layouts_are_counted_from_few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By counting parts instead of seconds: shared parts are made once (docs/planner.md)."""
    memos: list[Memo] = []
    monkeypatch.setattr(search, "Memo", lambda some: memos.append(Memo(some)) or memos[0])
    every = answer_to(*job("mixtral-8x7b", 256, "h100-80", 8192, 1024)).counted
    assert len(every) > 10_000
    made = Counter(part.__name__ for part, *_ in memos[0].parts)  # type: ignore[attr-defined]
    assert made["layer_activations"] + made["layer_passes"] < 0.1 * len(every)
    assert made["states_that_differ"] + made["synchronised"] < 0.1 * len(every)
    assert made["batch"] + made["computed"] < 0.8 * len(every)
    played = sum(map(simulated, every))
    planned = sum(each.trained is not None for each in every)
    assert played <= planned <= 3 * len(ASKED)


def simulated(counted: Counted) -> bool:
    """Return True if the allocator was simulated for a layout."""
    return "reserved" in vars(counted.memory.worst)


def shown(answered: Answer) -> list[Layout | None]:
    """Return the layouts in an answer: the recommended, the fastest, and one of each way that
    fits.
    """
    some = answered.best, answered.quickest, *answered.ways.values()
    return [each.layout if each and each.answers else None for each in some]


def test_rows_divided_too_often_keep_their_residuals_whole() -> None:
    question = question_of(arguments(*SMALL[:-1], 24, "--global-batch", 64))
    layout = next(layouts(question.some.shape, 4, 4, 24, 64, lora=False))
    base = question.base[layout.state]
    for sequence, divides in ((1, True), (4, False)):  # 24 and 6 tokens over 4 tensor ranks
        divided = replace(layout, tensor=4, sequence=sequence)
        assert divided.inputs(base, 16, 64, False, False).divides_residuals == divides


def test_shown_layouts_are_planned_and_rejected_ones_excluded() -> None:
    question = question_of(arguments(*JOB))
    every = [*layouts(question.some.shape, 4, 4, 1024, 64, lora=False)]
    usual = answer_of(count(question, every))
    assert usual.best is not None
    assert all(each.trained for each in usual.ways.values() if each.fits)
    why = "but nobody trained it"
    refused = replace(question, refusal=lambda one: why if way_of(one) == "ZeRO 1" else "")
    again = answer_of(count(refused, every))
    assert way_of(usual.best.layout) == "ZeRO 1"
    assert again.best is not None
    assert way_of(again.best.layout) == "ZeRO 2"
    assert why_not(again.ways["ZeRO 1"], again.best) == f"rejected: {why}"
    assert not any(each.answers for each in again.counted if each.trained is False)


@pytest.mark.parametrize(
    ("model", "gpus", "seq_len", "batch", "expected"), rows_of("recommended", 2)
)
def test_least_risky_layout(model: str, gpus: int, seq_len: int, batch: int, expected: str) -> None:
    answered = answer_to(*job(model, gpus, "h100-80", seq_len, batch))
    best, quickest = answered.best, answered.quickest
    assert best is not None
    assert quickest is not None
    assert best.layout.text == expected
    assert quickest.seconds <= best.seconds < seconds_within(quickest)[1]
    assert best.has_room(0.05)
    most = min(seconds_within(each)[1] for each in answered.ways.values() if each.has_room(0.05))
    for each in answered.ways.values():
        if each.answers and each.has_room(0.05) and risk(each) < risk(best):
            assert each.seconds > most


@pytest.mark.parametrize(("changes", "expected", "kind"), TABLES["risks"])
def test_risks_are_counted(changes: dict[str, Any], expected: list[int], kind: str) -> None:
    layout = replace(Layout(1, "none", 1, 1, 1, 1, 4, "none"), **changes)
    question = SimpleNamespace(some=SimpleNamespace(gpus_per_node=8))
    counted: Any = SimpleNamespace(layout=layout, question=question)
    assert [*risk(counted)] == expected
    assert choose.error_of(layout) == choose.ERRORS[kind]


def test_room_is_what_the_most_memory_leaves() -> None:
    question = SimpleNamespace(device_bytes=100)
    counted: Any = SimpleNamespace(peak_interval=(80, 96), question=question)
    assert [Counted.has_room(counted, share) for share in (0.03, 0.05)] == [True, False]


def test_planner_answer_has_a_row_per_way() -> None:
    answered = answer_to(*job("mixtral-8x7b", 16, "h200", 4096, 256))
    assert {*answered.ways} == {*ASKED}
    runs = [(str(each.layout.deepspeed), each.layout) for each in answered.ways.values()]
    assert len({*runs}) == len(ASKED)
    reasons = [why_not(each, answered.best) for each in answered.ways.values()]
    assert all(reason and len(reason) < 110 for reason in reasons), reasons
    assert reasons.count("recommended") == 1


@pytest.mark.parametrize(("model", "gpus", "gpu", "seq_len", "batch"), rows_of("sums", 2))
def test_sums_of_shared_parts(model: str, gpus: int, gpu: str, seq_len: int, batch: int) -> None:
    """Every axis, offload, precision and window: one layout for each way to divide."""
    _, question = job(model, gpus, gpu, seq_len, batch)
    shape = question.some.shape
    every = [*layouts(shape, gpus, question.machine.gpus_per_node, seq_len, batch, lora=False)]
    some = {each.layout.way: each for each in count(question, every[::7])}
    assert len(some) > 40
    for counted in some.values():
        memory, shared = estimate_memory(counted.inputs, question.device_bytes), counted.memory
        worst, text = memory.worst, counted.layout.text
        assert (shared.worst.peak, shared.worst.stage) == (worst.peak, worst.stage), text
        assert shared.host_bytes_per_node == memory.host_bytes_per_node, text
        assert shared.worst.loose == worst.loose, text
        assert counted.time.terms == estimate_time(counted.inputs, question.machine).terms, text
        if counted.fits is None:
            continue  # its allocator decides, which is not simulated here
        assert counted.fits == (memory.verdict == "fits" and not counted.missing_host_bytes)


@pytest.mark.gate("plan")
def test_a_family_that_is_not_known_is_traced_and_counted(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
    sizes |= {"max_position_embeddings": 256, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = {"model_type": "smollm3", **sizes, **tokens}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    args, question = job(str(path), 4, "a100-40", 64, 32)
    best = answer_to(args, question).best
    assert best is not None
    assert best.inputs.layers_by == "traced"
    again = plan_of(args, best.layout, question.run).estimate
    assert again is not None
    assert again.worst.peak == pytest.approx(best.memory.worst.peak, rel=0.01)


@pytest.mark.parametrize(("model", "gpus", "gpu", "seq_len"), TABLES["searches"])
def test_lazy_search_finds_what_all_finds(model: str, gpus: int, gpu: str, seq_len: int) -> None:
    args, question = job(model, gpus, gpu, seq_len, 32)
    few, every = answer_to(args, question), count_all(args, question)
    for each in every:
        each.decide()
    assert shown(few) == shown(answer_of(every))
    asked = [sum(map(simulated, counted)) for counted in (few.counted, every)]
    assert asked[0] < asked[1]


@pytest.mark.parametrize(("gpus", "more"), rows_of("written", 2))
def test_written_files_are_the_priced_job(gpus: int, more: list[str], tmp_path: Path) -> None:
    done = run_tool("plan_cluster", *JOB, "--gpus", gpus, "--write", tmp_path, "--json", *more)
    row = json.loads(done.stdout)["layouts"][0]
    command = Command(tmp_path / "ds.json", tmp_path / "run.toml")
    world = cluster(gpus, None, "a100-40")
    plan = plan_from(command, world=world)
    step = step_time(plan)
    assert step is not None
    assert plan.estimate is not None
    assert step.seconds == pytest.approx(row["step_time_s"], rel=1e-3)
    whole = job_of(plan, step)
    assert whole is not None
    assert whole.gpu_hours == pytest.approx(row["gpu_hours"], rel=1e-2, abs=0.1)
    shown = plan.estimate.worst.shown_within(int(find_gpu("a100-40").memory_gib * GIB))
    assert [size / GIB for size in shown] == pytest.approx(row["peak_gib"], rel=1e-3)
    run = tomllib.loads((tmp_path / "run.toml").read_text())
    assert (run["data"]["path"], run["optim"]["lr"]) == ("/path/to/your/data", 6e-4)
    asked = load_run_config(None, more)
    chosen = run["optim"]["schedule"], run["train"].get("steps")
    assert chosen == (asked.optim.schedule, asked.train.steps)
    every_s = (2 * row["save_s"] * 50_000 * 3600 / gpus) ** 0.5  # Young's; a GPU runs 50,000 h
    assert run["save"]["every"] * step.seconds == pytest.approx(every_s, rel=0.02)
    assert "a rate" not in dry_run(plan, elsewhere=True).text()


@pytest.mark.parametrize("words", TABLES["data"])
def test_the_written_run_config_has_the_users_tables(words: str, tmp_path: Path) -> None:
    run_tool("plan_cluster", *JOB, words, "--write", tmp_path)
    written, asked = load_run_config(tmp_path / "run.toml"), load_run_config(None, [words])
    data = written.data.model_dump(exclude_unset=True)
    assert data.pop("path", None) == (None if asked.data.mix else "/path/to/your/data")
    assert data == asked.data.model_dump(exclude_unset=True) | {"seq_len": 1024}


def test_each_launcher_has_a_script_that_runs_anywhere(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two nodes"
    part = run_tool("plan_cluster", *JOB, "--write", one).stdout
    nodes = ("--gpus-per-node", 2)
    whole = run_tool("plan_cluster", *JOB, *nodes, "--write", two).stdout
    scripts = {"ds.json", "run.toml", "job.sh", "kubernetes.yaml"}
    assert {path.name for path in one.iterdir()} == {*scripts, "sbatch.sh"}
    scripts |= {"hostfile", "hostfile.sh", "torchrun.sh"}
    assert {path.name for path in two.iterdir()} == scripts
    clone, empty = tmp_path / "a clone", tmp_path / "empty"
    for folder in (empty, clone / "slurm"):
        folder.mkdir(parents=True)
    for name in ("deepspeed", "sbatch", "torchrun"):  # stand-ins, first on the site's PATH
        (clone / name).write_text(f'#!/bin/sh\nprintf "%s\\n" "$PWD" {name} "$@"\n')
        (clone / name).chmod(0o755)
    (clone / "slurm/site.env").write_text("export PATH=$PWD:$PATH\n")
    env = {"PATH": os.environ["PATH"], "NODE_RANK": "1", "MASTER_ADDR": "node1"}
    env["CLONE"] = str(clone)
    words = {}
    for path in (*one.glob("*.sh"), *two.glob("*.sh")):
        assert f"clone=${{CLONE:-{REPOSITORY}}} #" in path.read_text()
        run = ["bash", f"../{path.relative_to(tmp_path)}", "a.b=1 2"]
        done = subprocess.run(run, cwd=empty, env=env, capture_output=True, text=True, check=True)
        start, *words[path], json_option, ds, toml_option, toml, more = done.stdout.splitlines()
        assert (start, more) == (str(empty), "a.b=1 2")
        assert (json_option, toml_option) == ("--deepspeed", "--config")
        assert (Path(ds), Path(toml)) == (path.parent / "ds.json", path.parent / "run.toml")
    train, batch = f"{clone}/harness/train.py", f"{clone}/slurm/train.sbatch"
    assert words[one / "job.sh"] == ["deepspeed", "--num_gpus", "4", train]
    assert words[one / "sbatch.sh"] == ["sbatch", "--nodes=1", "--gpus-per-node=4", batch]
    booked = ["sbatch", "--nodes=2", "--gpus-per-node=2", "--exclusive", "--mem=0", batch]
    assert words[two / "job.sh"] == booked
    assert words[two / "hostfile.sh"] == ["deepspeed", "--hostfile", f"{two}/hostfile", train]
    assert words[two / "torchrun.sh"][3:5] == ["--node-rank=1", "--master-addr=node1"]
    for text in (part, one.joinpath("sbatch.sh").read_text()):
        assert "set SBATCH_CPUS_PER_GPU and SBATCH_MEM_PER_GPU in slurm/site.env" in text
    assert "SBATCH_" not in whole
    assert two.joinpath("hostfile").read_text() == "node1 slots=2\nnode2 slots=2\n"
    _, pods = yaml.safe_load_all(two.joinpath("kubernetes.yaml").read_text())
    assert pods["spec"]["completions"] == pods["spec"]["parallelism"] == 2
    assert pods["spec"]["backoffLimit"] == 20
    (pod,) = pods["spec"]["template"]["spec"]["containers"]
    assert shlex.split(pod["args"][0])[-2:] == ["two nodes/run.toml", "run.dir=runs/train"]
    assert f"copy {two} into the claim's clone, as two nodes" in whole
    (line,) = [line for line in whole.splitlines() if line.startswith("check it with: ")]
    program, script, *checks = shlex.split(line.partition(": ")[2])
    assert (program, script) == ("python", "harness/train.py")
    checked = parse_command(checks)
    assert (checked.dry_run, checked.gpus, checked.gpus_per_node) == (True, 4, 2)
    assert checked.gpu == "a100-40"
    assert (checked.deepspeed_path, checked.config_path) == (two / "ds.json", two / "run.toml")


@pytest.mark.parametrize(("words", "model", "rate", "said"), TABLES["weights"])
def test_the_job_starts_from_the_weights_that_it_names(
    words: str, model: dict[str, Any], rate: float | None, said: str, tmp_path: Path
) -> None:
    sizes = {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    asked = words.replace("HERE", str(tmp_path)).split()
    text = run_tool("plan_cluster", *JOB, *asked, "--write", tmp_path / "plan").stdout
    run = tomllib.loads((tmp_path / "plan/run.toml").read_text().replace(str(tmp_path), "HERE"))
    assert (run["model"], run["optim"].get("lr")) == (model, rate)
    assert said.replace("HERE", str(tmp_path)) in " ".join(text.split())


def test_continued_rates_are_those_of_the_recipe() -> None:
    recipe = (REPOSITORY / "docs/recipes/continued.toml").read_text()
    rates = {"llama-2-7b": 1e-4, "llama-3-70b": 5e-5}
    for model, rate in rates.items():
        assert f"{rate:.0e}".replace("e-0", "e-") in recipe
        plan = make_plan(RunConfig.model_validate({"model": {"name": model}}), {}, World())
        assert plan.shape is not None
        assert continued_rate(plan.shape)[0] == rate


def test_a_budget_limits_what_is_recommended() -> None:
    priced = (*JOB, "--price", 2, "--budget")
    cost = answer(*priced, 1e6)["layouts"][0]["cost"]
    usual = answer_to(args := arguments(*priced, 1.001 * cost), question_of(args)).best
    assert usual is not None
    assert usual.question.cost(usual) == pytest.approx(cost, rel=1e-3)
    done = run_tool("plan_cluster", *priced, cost / 2, code=3)
    assert "Nothing is within the budget, which pays for about 1.2" in done.stdout  # of 2.5B
    assert "more than the budget" in " ".join(done.stdout.split())


def test_priced_job_saves_as_often_as_its_config() -> None:
    question = question_of(arguments(*JOB, "--data-tokens", "1B", "save.every=1000"))
    (counted,) = count(question, [next(iter(layouts(question.some.shape, 4, 4, 1024, 64, False)))])
    assert question.job(counted).saves == question.steps(counted) // 1000 == 15


def test_text_fits_80_columns_and_has_time_cost_and_reasons() -> None:
    asked = ("--data-tokens", "300B", "--price", 2, "--deadline-days", 1)
    text = run_tool("plan_cluster", *JOB, *asked).stdout
    files = ("  ds.json", "  run.toml", "  job.sh", "  sbatch.sh")
    prose = [line for line in text.splitlines() if not line.startswith(files)]
    assert max(map(len, prose)) <= 80
    assert "\n  the deadline of 1 days is missed: about " in text
    for words in ("Recommended:", "GPU-hours", "kWh", "cost ", "with failures", "Why not ...?"):
        assert words in text


def test_a_model_that_nothing_holds_is_code_3_with_the_nearest() -> None:
    small = ("--gpus", 1, "--gpu", "a100-40", "--seq-len", 4096, "--global-batch", 8)
    done = run_tool("plan_cluster", "--model", "llama-3-70b", *small, code=3)
    assert "Nothing fits. The nearest:" in done.stdout
    assert "GiB too much" in done.stdout


def test_one_card_of_24_gib_trains_7b_offloaded_or_with_adapters() -> None:
    card = ("--gpus", 1, "--gpu", "rtx-4090", "--seq-len", 2048, "--global-batch", 8)
    offloaded = answer("--model", "olmo2-7b", *card)["layouts"][0]
    assert offloaded["fits"]
    assert "offload" in json.dumps(offloaded["deepspeed"])
    adapters = answer("--model", "olmo2-7b", *card, "--lora", 16)["layouts"][0]
    assert adapters["fits"]
    assert adapters["tokens_per_s_per_gpu"] > offloaded["tokens_per_s_per_gpu"]
    rows = answer("--model", "olmo2-7b", *card, "--lora", 16, "--quantize", "nf4")["layouts"]
    stages = {row["deepspeed"]["zero_optimization"]["stage"] for row in rows}
    assert stages == {1, 2}
    assert min(row["peak_gib"] for row in rows) < adapters["peak_gib"]


def test_a_node_has_host_memory_for_each_of_its_gpus() -> None:
    assert question_of(arguments(*JOB)).host_bytes == 4 * 256 * GIB
    assert question_of(arguments(*JOB, "--host-memory", 10)).host_bytes == 10 * GIB


def test_a_small_host_excludes_offload(planned: dict[str, Any]) -> None:
    rows = answer(*JOB, "--host-memory", 10)["layouts"]
    for row in rows:
        if row["fits"]:
            assert row["host_gib"] * GIB <= 10 * GIB
    assert any("for the host memory of a node" in row["why_not"] for row in rows)


ONE_CARD = (
    *("--model", "llama-1b", "--gpus", 1, "--gpu", "rtx-4090", "--seq-len", 2048),
    *("--global-batch", 32, "--host-memory", 64),
)


def test_largest_fitting_micro_batch_is_found() -> None:
    args = arguments(*ONE_CARD)
    counted = count_all(args, question_of(args))
    most = max(each.layout.micro_batch for each in counted if each.decide())
    assert largest_micro_batch(counted).startswith(f"{most} ")
    job = (one := counted[0]).question.job(one)
    assert _spent(one) == Spent(1, job.days_with_failures, job.cost(1.0), one.layout.text)


def test_numbers_of_gpus_that_are_slower_and_dearer_are_left_out() -> None:
    cheap, quick = Spent(8, 10, 100, "a"), Spent(32, 3, 120, "b")
    worse = Spent(16, 11, 110, "c")
    assert front_of([quick, worse, cheap]) == [cheap, quick]


def test_layout_that_is_unusable_sets_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "error_of", lambda layout: SimpleNamespace(half=0.1))
    monkeypatch.setattr(choose, "risk", lambda each: 0)

    def candidate(seconds: float, usable: bool) -> SimpleNamespace:
        asked = dict.fromkeys(("has_room", "may_have_room"), lambda share: True)
        return SimpleNamespace(seconds=seconds, layout=0, is_usable=lambda: usable, **asked)

    quick, slow = candidate(1.0, False), candidate(9.0, True)
    assert choose.recommended([quick, slow]) is slow
