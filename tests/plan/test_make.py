"""A full plan: the command line, DeepSpeed's JSON, values for "auto", record, text and time."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from harness.errors import ConfigError, ExitCode
from harness.estimate.fit import changes_that_help
from harness.layout.world import World
from harness.plan import resolve_auto
from harness.plan.command import DEFAULT_DS_JSON, Command, parse_command, plan_from
from harness.plan.duration import beside_of, job_of, length, step_time
from harness.plan.machine import cluster
from harness.plan.make import takes
from harness.plan.text import summary
from harness.run.dry_run import DryRun, dry_run
from tests.plan.plans import Planner
from tests.plan.test_ds_shapes import SHAPES
from tests.real_runs import TRAIN, environment
from tests.tables import beside
from tools.cluster.ask import question_of
from tools.plan_cluster import make_parser

pytestmark = pytest.mark.usefixtures("cpu_with_bf16")

CPU = {"DS_ACCELERATOR": "cpu"}


def problems_of(*argv: str, environ: Mapping[str, str] = CPU) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        plan_from(parse_command(argv), environ)
    return caught.value.problems


def test_options_and_assignments_in_any_order() -> None:
    assert parse_command([]) == Command()
    assert DEFAULT_DS_JSON.is_file()
    command = parse_command(
        ["train.steps=1", "--local_rank=3", "--dry-run", "optim.lr=1", "--deepspeed", "x.json"]
    )
    assert command.assignments == ("train.steps=1", "optim.lr=1")
    assert (str(command.deepspeed_path), command.dry_run) == ("x.json", True)
    assert command.trust_remote_code is False


@pytest.mark.parametrize("flag", ["--local_rank=3", "--local-rank=3", "--local_rank 3"])
def test_launcher_arguments_are_accepted(flag: str) -> None:
    assert parse_command(flag.split()).local_rank == 3


@pytest.mark.parametrize(("words", "code", "error"), beside(__file__, "make.toml")["answers"])
def test_help_and_usage_errors_exit_with_a_text(words: str, code: int, error: str, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_command(words.split())
    assert caught.value.code == code
    captured = capsys.readouterr()
    assert error in (captured.err if code else captured.out)


def test_texts_of_any_script_are_shown_on_any_terminal(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("на любом языке\n" * 5000)
    command = [sys.executable, TRAIN, "--dry-run", "--show", "1", f"data.path={tmp_path / 'a.txt'}"]
    ascii_alone = environment(PYTHONIOENCODING="ascii")
    done = subprocess.run(command, env=ascii_alone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert r"the first begins '\u043d\u0430" in done.stdout
    assert r"\u043d\u0430\xab" in done.stdout  # «


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """Return a folder that this process may not enter."""
    folder, user = tmp_path / "closed", os.geteuid()
    folder.mkdir(mode=0)
    os.seteuid(user or 65534)  # root may enter any folder
    yield folder
    os.seteuid(user)
    folder.chmod(0o700)


@pytest.mark.parametrize(
    "key", ["run.dir", "model.name", "model.init_from", "data.tokenizer", "data.rehearse"]
)
def test_a_path_that_this_user_may_not_enter_is_a_problem(key: str, closed: Path) -> None:
    problems = problems_of(f"{key}={closed / 'x'}")
    denied = [each for each in problems if str(closed) in each and "Permission denied" in each]
    assert len(denied) == 1


def test_ds_assignments_edit_json_and_launcher_sets_ranks() -> None:
    environ = {**CPU, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    command = parse_command(["ds.zero_optimization.stage=2", "train.steps=3"])
    made = plan_from(command, environ)
    assert (made.zero_stage, made.steps) == (2, 3)
    assert made.deepspeed_given["zero_optimization"]["stage"] == 2
    assert (made.world.rank, made.grid.data, made.grad_accum) == (1, 2, 3)


def test_mistakes_of_files_and_command_line_are_one_report(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[optim]\nlr = -1\n[train]\nglobal_batch = 10\n")
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimisation": {}, "fp16": {"x": 1}}))
    argv = ["--config", str(tmp_path / "run.toml"), "--deepspeed", str(tmp_path / "ds.json")]
    environ = {**CPU, "RANK": "0", "WORLD_SIZE": "4"}
    problems = problems_of(*argv, "data.lenght=3", "ds.fp16=", "run.toml", environ=environ)
    mistakes = ("optim.lr is -1", "data.lenght", "'run.toml' is not key=value", "fp16 is ''")
    for part in (*mistakes, "zero_optimisation"):
        assert sum(part in problem for problem in problems) == 1, part
    assert len(problems) == 5
    (tmp_path / "ds.json").write_text("{")
    argv = ["--config", str(tmp_path / "none.toml"), "--deepspeed", str(tmp_path / "ds.json")]
    assert len(problems_of(*argv, "optim.lr=-1")) == 3


def test_an_impossible_environment_is_a_config_error() -> None:
    assert "rank 2 of 2" in problems_of(environ={"RANK": "2", "WORLD_SIZE": "2"})[0]


HF_TRAINER_ZERO3 = SHAPES["trainer, stage 3, offload"]["json"]
BF16 = "ds.bf16.enabled=true ds.zero_optimization.stage=2"
AUTO = "ds.zero_optimization.stage=1 ds.bf16.enabled=auto"
CLUSTER = ["--dry-run", "model.name=llama-1b", "data.seq_len=2048", "train.global_batch=64"]


def test_a_json_of_the_hugging_face_trainer_works_unchanged(planned: Planner) -> None:
    before = json.dumps(HF_TRAINER_ZERO3)
    made = planned("RANKS=2 optim.warmup_steps=7 train.steps=20 optim.lr=1e-4", HF_TRAINER_ZERO3)
    ds = made.deepspeed
    assert '"auto"' not in json.dumps(ds)
    assert "scheduler" not in ds
    assert (ds["bf16"]["enabled"], ds["fp16"]["enabled"]) == (True, False)
    assert ds["steps_per_print"] == 2000
    hidden = made.model_config["hidden_size"]
    zero = ds["zero_optimization"]
    assert zero["reduce_bucket_size"] == hidden**2
    assert zero["stage3_prefetch_bucket_size"] == int(0.9 * hidden**2)
    assert zero["stage3_param_persistence_threshold"] == 10 * hidden
    assert (zero["sub_group_size"], type(zero["sub_group_size"])) == (10**9, int)
    assert made.config.optim.schedule == "constant"
    assert made.schedule(20).lr(20) == made.config.optim.lr
    # The record is plain JSON and complete.
    saved = json.loads(json.dumps(made.to_json(), allow_nan=False))
    assert saved["deepspeed"] == made.deepspeed
    assert json.dumps(saved["deepspeed_given"]) == json.dumps(HF_TRAINER_ZERO3) == before
    assert saved["run"]["optim"]["lr"] == 1e-4
    assert saved["run_set"]["optim.lr"] == "command line"
    assert saved["grid"]["data"] == 2


def test_emulated_bf16_is_not_automatic(monkeypatch: pytest.MonkeyPatch, planned: Planner) -> None:
    monkeypatch.setattr(resolve_auto, "cpu_has_bf16", lambda: False)
    made = planned(AUTO)
    assert (made.precision, made.deepspeed["bf16"]["enabled"]) == ("fp32", False)
    assert [event["kind"] for event in made.events] == ["fallback"]
    assert planned(BF16).precision == "bf16"


@pytest.mark.parametrize("estimate", [False, pytest.param(True, marks=pytest.mark.gate("plan"))])
def test_unknown_architecture_is_planned_without_shape(estimate: bool, planned: Planner) -> None:
    """An estimate would have to trace a model that transformers cannot build."""
    config = {"model_type": "brand_new", "hidden_size": 8, "vocab_size": 16}
    line = f"model.name={planned.add('brand_new', config).parent}"
    made = planned(line, estimate=estimate)
    assert made.shape is None
    assert [event["kind"] for event in made.events] == ["unknown_architecture", "learning_rate"]
    assert "optim.lr is 0.003, the default of small models" in made.events[-1]["message"]
    assert "does not know this architecture" in dry_run(made).text()


def test_missing_data_and_templates_are_in_the_report(planned: Planner, tmp_path: Path) -> None:
    (tmp_path / "tokens.bin").touch()
    for path, is_missing in (("tokens", False), ("tokens.bin", False), ("texts", True)):
        (problem,) = planned.problems(f"data.path={tmp_path / path}")
        assert problem.startswith("data.path: ")
        assert (f"{tmp_path / path} does not exist" in problem) is is_missing
    words = f"data.path={tmp_path / 'chats.jsonl'} data.template=chatlm"
    template, path, batch = planned.problems(f"{words} train.global_batch=48 train.micro_batch=5")
    assert batch.startswith("train.micro_batch = 5 does not divide")
    assert template.startswith("data.template is 'chatlm'")
    assert template.endswith("chatml, gemma, llama3, mistral, phi; did you mean chatml?")
    assert "chats.jsonl does not exist" in path
    # For a cluster, whose files are not here, only a name.
    on_gpus = "GPU=h100-80 data.path=/there.jsonl data.eval_path=/held-out data.template="
    assert planned(f"{on_gpus}/there.jinja", estimate=False).config.data.path == "/there.jsonl"
    assert len(planned.problems(f"{on_gpus}chatlm")) == 1
    mixed = 'data.mix=\'[{path="/a.jsonl"}, {path="/b.jsonl"}]\' data.eval_path.code=/c.jsonl'
    problems = planned.problems(f"{mixed} data.rehearse=/d data.tokenizer=./e")
    assert [text.partition(" does not")[0] for text in problems] == [
        *("data.mix a: /a.jsonl", "data.mix b: /b.jsonl", "data.rehearse: /d"),
        *("data.eval_path code: /c.jsonl", "data.tokenizer: ./e"),
    ]


def test_a_cluster_is_planned_from_a_laptop() -> None:
    command = parse_command([*CLUSTER, "--gpus", "64", "--gpu", "h100-80"])
    world = command.elsewhere()
    assert world == World(world_size=64, local_world_size=8, accelerator="cuda", gpu="h100-80")
    plan = plan_from(command, world=world)
    text = dry_run(plan, elsewhere=True).text()
    assert re.search(r"^time  .* s per step .* GPU-hours without", text, re.MULTILINE)
    assert re.search(r"^the cluster    fits", text, re.MULTILINE)
    assert "this machine" not in text
    step = step_time(plan)
    job = job_of(plan, step)
    evaluating = beside_of(plan.config, step, 100).evaluating
    assert job.seconds == pytest.approx(100 * step.seconds + evaluating)


def test_autocast_has_products_in_bf16_and_weights_in_fp32(planned: Planner) -> None:
    keys = "GPU=h100-80 RANKS=8 model.name=llama-1b data.seq_len=2048 ds.zero_optimization.stage=2"
    cast = "ds.torch_autocast.enabled=true ds.torch_autocast.dtype=bfloat16"
    plans = [planned(f"{keys} {ds}") for ds in ("ds.bf16.enabled=true", cast, "")]
    half, autocast, wide = (step_time(plan).seconds for plan in plans)
    assert half < autocast < wide / 3
    held = [plan.estimate.worst.phase("backward_first") for plan in plans]
    weights = held[0]["parameters"]
    assert [one["parameters"] for one in held[1:]] == [2 * weights] * 2
    copies = [one.get("autocast: weights", 0) for one in held]
    assert copies == [0, pytest.approx(weights, rel=0.25), 0]


@pytest.mark.parametrize(("gpu", "half"), [("v100-32", "fp16"), ("h100-80", "bf16")])
def test_half_precision_is_first_change_that_fits(gpu: str, half: str, planned: Planner) -> None:
    keys = f"GPU={gpu} RANKS=8 model.name=llama-2-7b data.seq_len=2048 model.checkpointing=full"
    plan = planned(f"{keys} ds.zero_optimization.stage=3 train.micro_batch=8")
    room = int(plan.estimate.needed * 0.9)
    text = changes_that_help(plan.estimate, room, takes(plan))
    assert text.startswith(f"any one of these makes it fit: ds.{half}.enabled=true (-")


def test_an_evaluation_reads_each_held_out_set_and_the_old_data(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("text " * 1000)
    sets = f'data.eval_path={{a="{text}", b={{path="{text}"}}}}'
    seconds = []
    for words in ([], [f"data.eval_path={text}"], [sets, f"data.rehearse={text}"]):
        words = ["--gpus", "8", "--gpu", "h100-80", "model.kernels=none", *words]
        command = parse_command([*CLUSTER, *words])
        plan = plan_from(command, world=command.elsewhere())
        seconds.append(beside_of(plan.config, step_time(plan), 100).evaluation_seconds)
    assert seconds == [seconds[0], seconds[0], pytest.approx(3 * seconds[0])]


def test_a_cluster_that_is_too_small_gets_changes_that_help() -> None:
    words = [*CLUSTER, "model.name=llama-3-70b", "--gpus", "8", "--gpu", "a100-80"]
    command = parse_command(words)
    text = dry_run(plan_from(command, world=command.elsewhere()), elsewhere=True).text()
    assert re.search(r"^the cluster    does not fit: \w", text, re.MULTILINE)


def test_two_changes_make_8b_fit_on_eight_cards_of_24_gib() -> None:
    """Neither does alone. Both are possible, and come before other lengths and more GPUs."""
    words = ["--dry-run", "--gpus=8", "--gpu=rtx-4090", "--deepspeed=ds_configs/zero3.json"]
    words += ["model.name=llama-3-8b", "data.seq_len=4096"]
    seen = _elsewhere(words)
    assert (seen.fits, seen.code) == (False, ExitCode.DOES_NOT_FIT)
    advice, _, planner = seen.verdict.partition("; other layouts: python tools/plan_cluster.py ")
    listed = re.findall(r"(\S+) (\S+) \(-", advice.partition("makes it fit: ")[2])
    assert listed[0][0] == "model.checkpointing=selective"
    assert listed[0][1] == "ds.zero_optimization.offload_optimizer.device=cpu"
    assert "GPUs (" not in advice
    assert "seq_len" not in advice
    for pair in listed:
        assert not any(_elsewhere([*words, change]).fits for change in pair)
        fits = _elsewhere([*words, *pair])
        assert (fits.fits, fits.code) == (True, ExitCode.DONE)
    assert _elsewhere([*words, "plan.force=true"]).code == ExitCode.DONE  # as the run's
    assert json.loads(json.dumps(seen.to_json()))["fits"] is False
    asked = question_of(make_parser().parse_args(shlex.split(planner)))
    assert (asked.gpus, asked.global_batch, asked.run.data.seq_len) == (8, 48, 4096)


def _elsewhere(words: list[str]) -> DryRun:
    command = parse_command(words)
    return dry_run(plan_from(command, world=command.elsewhere()), elsewhere=True)


@pytest.mark.parametrize("machine", ["", "GPU=h100-80 RANKS=2 RANKS_PER_GPU=2"])
def test_no_time_is_predicted_for_cpus_and_shared_gpus(machine: str, planned: Planner) -> None:
    plan = planned(machine)
    assert step_time(plan) is None
    assert "\ntime " not in summary(plan)


def test_a_cluster_has_all_its_problems_in_one_report() -> None:
    with pytest.raises(ConfigError) as caught:
        cluster(0, -1, None)
    assert len(caught.value.problems) == 2
    with pytest.raises(ConfigError) as caught:
        _elsewhere(["--dry-run", "--gpus", "8", "--gpu", "h9000", "model.name=llama-1c"])
    assert [problem.partition(" is")[0][:25] for problem in caught.value.problems] == [
        *("--gpu: unknown GPU 'h9000'"[:25], "model.name")
    ]
    with pytest.raises(ConfigError, match="--gpus 12 is not a multiple of 8 GPUs per node"):
        cluster(12, None, "h100-80")


def test_duration_is_shown_in_readable_units() -> None:
    seconds = (90, 7200, 86400, 864000)
    assert [*map(length, seconds)] == ["2 minutes", "2.0 hours", "24.0 hours", "10.0 days"]
