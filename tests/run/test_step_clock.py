"""A run compares its steps with the plan's time, and a site's rates are fitted to runs."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.errors import ConfigError
from harness.estimate.step_time.calibration import Site
from harness.launch.fork_server import Zygote
from harness.plan.command import parse_command, plan_from
from harness.plan.duration import read_site, step_time
from harness.plan.plan import Plan
from harness.run.meter import StepClock, seen_tokens
from harness.runfolder import RunFolder
from tests.real_runs import SHORT_RUN, SMALL_MODEL, events, write_corpus
from tests.run_tools import run_tool
from tests.tables import beside

TABLES = beside(__file__, "step_clock.toml")
SITE = Site(None, "fp32", 2, {"products": 1.5}, 3, 0.05)


def plan(rates: Path | None, *more: str) -> Plan:
    words = ["ds.bf16.enabled=false", *more, *([f"plan.rates={rates}"] if rates else [])]
    return plan_from(parse_command(["model.name=tiny", *words]), {"DS_ACCELERATOR": "cpu"})


@pytest.fixture
def site(tmp_path: Path) -> Path:
    SITE.write(tmp_path / "site.json")
    return tmp_path / "site.json"


def test_steps_of_cpu_ranks_have_a_time_where_a_site_has_rates(site: Path) -> None:
    assert step_time(plan(None)) is None
    step = step_time(plan(site))
    assert step is not None
    assert step.machine.evidence == "measured"
    assert step.terms["host"] > 0


def test_rates_that_are_none_or_anothers_are_refused(site: Path) -> None:
    site.write_text("{}")
    with pytest.raises(ConfigError, match=r"plan\.rates is .*holds no rates of measured runs"):
        plan(site)
    replace(SITE, gpu="h100-sxm", precision="bf16").write(site)
    with pytest.raises(ConfigError, match="on h100-sxm in bf16, but this is cpu in fp32"):
        plan(site)


def test_rates_are_read_once(site: Path) -> None:
    made = plan(site)
    site.unlink()
    assert step_time(made) == step_time(made)
    assert made.to_json()["site"]["factors"] == SITE.factors


def test_steps_that_differ_in_their_tokens_have_no_time(site: Path) -> None:
    for words in TABLES["differ"]:
        made = plan(site, "train.global_batch=48", "data.seq_len=128", *words)
        assert step_time(made) is None, words
        clock = StepClock(made)
        assert not any(clock.predicted_of_next_line() for _ in range(3))


def test_the_second_line_of_a_process_is_compared(site: Path) -> None:
    clock = StepClock(plan(site))
    compared = [bool(clock.predicted_of_next_line()) for _ in range(4)]
    assert compared == [False, True, False, False]
    without = StepClock(plan(None))
    assert not any(without.predicted_of_next_line() for _ in range(3))


@pytest.mark.parametrize(("documents", "length", "seen"), TABLES["seen"])
def test_tokens_that_are_seen_are_those_of_documents(
    documents: list[int], length: int | None, seen: float
) -> None:
    def batch(first: int, count: int) -> Any:
        assert count == (length or 32)
        positions = torch.cat([torch.arange(n) for n in documents]).repeat(count, 1)
        return SimpleNamespace(position_ids=positions)

    stream: Any = SimpleNamespace(document_mask=True, length=length, batch=batch)
    assert seen_tokens(stream) == seen
    stream.document_mask = False
    assert seen_tokens(stream) is None


def test_terms_are_named_where_the_time_is_off(site: Path) -> None:
    clock = StepClock(plan(site))
    assert clock.predicted is not None
    seconds = clock.predicted.seconds
    assert clock.text(seconds, 0.0).endswith("s per step, predicted +0.0% (measured rates)")
    late = clock.text(2 * seconds, seconds)
    assert "predicted -50.0% (measured rates) (!): the prediction has " in late
    assert "matrix products" in late
    assert "of waiting for data are not predicted" in late
    assert "waiting for data" not in clock.text(seconds / 2, seconds)


def test_a_run_says_both_times_and_a_site_is_fitted(zygote: Zygote, tmp_path, site: Path) -> None:
    folder, fitted = tmp_path / "run", tmp_path / "fitted.json"
    corpus = write_corpus(tmp_path / "corpus")
    words = [*SMALL_MODEL, *SHORT_RUN, f"data.path={corpus}", f"run.dir={folder}", "log.every=1"]
    words += ["data.document_mask=true", f"plan.rates={site}"]
    ended = zygote.run(words, tmp_path / "logs").succeeded()
    assert "time           " in ended.output
    run = RunFolder(folder)
    (event,) = events(run, "time")
    lines: dict[int, dict[str, Any]] = {m["step"]: m for m in run.read_metrics() if "loss" in m}
    assert event["step"] == 2
    assert event["measured_s"] == lines[2]["step_time_s"]
    assert 0 <= event["data_s"] < event["measured_s"]
    assert event["predicted"]["evidence"] == "measured"
    text = run_tool("plan_cluster", "--calibrate", folder, "--rates", fitted).stdout
    assert f"{fitted}: 1 runs, median error " in text
    site_of_run = read_site(fitted)
    assert (site_of_run.gpu, site_of_run.precision) == (None, "fp32")
    record = run.read_plan()
    assert record is not None
    assert site_of_run.cores == record["cores"] > 0
    shared = {**record, "world": {**record["world"], "ranks_per_gpu": 2}}
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "plan.json").write_text(json.dumps(shared))
    done = run_tool("plan_cluster", "--calibrate", tmp_path / "shared", "--rates", fitted, code=2)
    assert "its ranks shared GPUs, so its times say nothing about them" in done.stderr
    assert 0 < record["seen_tokens"] < record["run"]["data"]["seq_len"] / 2


def test_folders_that_are_no_runs_are_refused(tmp_path: Path) -> None:
    words = ("--calibrate", tmp_path, "--rates", tmp_path / "site.json")
    done = run_tool("plan_cluster", *words, code=2)
    assert f"--calibrate {tmp_path}: there is no plan.json" in done.stderr
    assert not (tmp_path / "site.json").exists()
