"""The preflight names outliers in given measurements."""

import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from harness.config.run_config import RunConfig
from harness.estimate.memory_item import GIB
from harness.layout.grid import axes_json
from harness.layout.world import World
from harness.plan.make import make_plan
from harness.plan.plan import Plan
from tests.real_runs import REPOSITORY
from tests.tables import beside
from tools import preflight
from tools.preflight_checks import files, network, report
from tools.preflight_checks.files import Seen, Storage, token
from tools.preflight_checks.flight import Facts, _rates, judge
from tools.preflight_checks.machine import Machine, machine_rows
from tools.preflight_checks.network import bus_gb_per_s, neighbour_rows, pair_rounds, ring_rounds
from tools.preflight_checks.report import Row, slow

HOSTS = ["n1", "n2", "n3", "n4"]
TABLES = beside(__file__, "preflight.toml")
SEEN: dict[str, str] = TABLES["seen"]
MACHINE = Machine(**TABLES["machine"], cores=(0, 1))
STORAGE = Storage("/runs", True, 1000 * GIB, (), 1e9)


def plan(axes: Any = None, **run: dict[str, Any]) -> Plan:
    world = World(world_size=4, local_world_size=1, accelerator="cuda", gpu="NVIDIA H100 80GB HBM3")
    ds = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, **axes_json(**axes or {})}
    return make_plan(RunConfig.model_validate({"model": {"name": "llama-1b"}, **run}), ds, world)


def healthy() -> list[Facts]:
    """Return reports of four nodes with one GPU each, without any problem."""
    pairs: list[list[tuple[str, int, float]]] = [[] for _ in HOSTS]
    for level, partner in pair_rounds(HOSTS):
        for rank, other in partner.items():
            pairs[rank].append((level, other, 40.0))
    return [
        Facts(
            clock_s=1000.0,
            links=network.Links(all_reduce_gb_per_s=35.0, pairs=pairs[rank], stage="finished"),
            seen=Seen(dict(SEEN)),
            storage=STORAGE,
            machine=replace(MACHINE, gpu_id=f"GPU-{rank}"),
        )
        for rank in range(4)
    ]


def row(check: str, reports: list[Facts | None] | list[Facts], **run: dict[str, Any]) -> Row:
    """Return the row of a check; all others must be ok."""
    rows = judge(plan(**run), HOSTS, reports)
    others = [result for result in rows if result.check != check and result.verdict != "ok"]
    assert others == []
    (result,) = [result for result in rows if result.check == check]
    return result


def changed(rank: int, part: str = "", **changes: Any) -> list[Facts]:
    """Return healthy reports with a changed part of one rank; without a part, its facts."""
    reports = healthy()
    if part == "seen":
        reports[rank] = replace(reports[rank], seen=Seen({**SEEN, **changes}))
    elif part:
        of_rank = replace(getattr(reports[rank], part), **changes)
        reports[rank] = replace(reports[rank], **{part: of_rank})
    else:
        reports[rank] = replace(reports[rank], **changes)
    return reports


@pytest.mark.parametrize(("check", "part", "changes", "verdict", "text"), TABLES["ranks"])
def test_a_rank_out_of_line_is_named(
    check: str, part: str, changes: dict[str, Any], verdict: str, text: str
) -> None:
    result = row(check, changed(1, part, **changes))
    assert result.verdict == verdict
    assert text in result.found
    assert bool(result.todo) == (verdict != "ok")


def test_weights_that_cannot_be_read_are_named(tmp_path, monkeypatch) -> None:
    (tmp_path / "a.safetensors").symlink_to("nowhere")
    monkeypatch.setattr(files, "DataSpec", mock.MagicMock())  # without data, only weights are read
    monkeypatch.setattr(files, "cached_fingerprint", lambda _: None)
    config = RunConfig.model_validate({"model": {"init_from": str(tmp_path)}})
    (problem,) = files.look(replace(plan(), config=config), False, True).problems
    assert problem.startswith(f"model.init_from: cannot read {tmp_path}/a.safetensors: ")


def test_healthy_nodes_are_ready() -> None:
    rows = judge(plan(), HOSTS, changed(1, "storage", written_bytes_per_s=8e8))
    assert [result for result in rows if result.verdict != "ok"] == []
    assert len(rows) > 20
    (written,) = [result for result in rows if result.check == "write speed"]
    estimate = plan().estimate
    assert estimate
    seconds = estimate.checkpoint_bytes / 4 / 8e8  # of the slowest
    assert f"about {seconds:.1f} s for a checkpoint" in written.found
    assert report.code(rows) == 0
    assert report.table(rows).endswith("preflight: ok to start, no warnings")


def test_ranks_that_may_share_a_gpu_are_ready_and_not_timed() -> None:
    shared = replace(plan(), world=replace(plan().world, local_world_size=4, ranks_per_gpu=4))
    one = replace(MACHINE, gpu_id="GPU-0", gpu_free_bytes=79 * GIB // 4)
    facts = [replace(each, machine=one) for each in healthy()]
    facts[0] = replace(facts[0], machine=replace(one, tflops=6.0))
    rows = {row.check: row for row in judge(shared, ["n1"] * 4, facts)}
    assert rows["GPU of its own"].found == "1 GPU, each for up to 4 ranks (HARNESS_SHARE_GPU)"
    assert {rows[name].verdict for name in ("GPU of its own", "GPU memory free")} == {"ok"}
    assert rows["matmul rate"].found.endswith("not judged: ranks share a GPU")
    rates = _rates(shared, ["n1"] * 4, facts)
    assert {rates["matmul_tflops"], rates["all_reduce_gb_per_s"]} == {None}


def test_a_step_is_predicted_with_the_rates_that_were_measured() -> None:
    text, slow = (
        next(each.found for each in judge(plan(), HOSTS, reports) if each.check == "time of a step")
        for reports in (
            healthy(),
            [replace(each, machine=replace(MACHINE, tflops=60.0)) for each in healthy()],
        )
    )
    assert "(measured)" in text
    assert float(slow.split()[0]) > float(text.split()[0])
    assert _rates(plan(), HOSTS, changed(1, "machine", tflops=9.0, launch_ms=2)) == TABLES["rates"]


@pytest.mark.parametrize("count", range(1, 10))
def test_ring_tests_each_neighbour_once_in_three_rounds(count: int) -> None:
    rounds = ring_rounds(count)
    assert len(rounds) <= 3
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    expected = {frozenset((n, (n + 1) % count)) for n in range(count)} if count > 1 else set()
    assert set(met) == expected
    assert len(met) == len(expected)
    for pairs in rounds:
        busy = [place for pair in pairs for place in pair]
        assert len(busy) == len(set(busy))


def test_network_tests_cover_node_and_peers_in_next_node() -> None:
    rounds = pair_rounds(["a", "a", "b", "b", "c"])
    assert all(partner[partner[rank]] == rank for _, partner in rounds for rank in partner)
    met = {(rank, other) for _, partner in rounds for rank, other in partner.items()}
    assert {(0, 1), (2, 3), (0, 2), (1, 3), (2, 4), (4, 0)} <= met
    assert (3, 4) not in met


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    """PERFORMANCE.md: the algorithm bandwidth times 2(n-1)/n."""
    assert bus_gb_per_s(8 * 10**9, 2.0, 8) == pytest.approx(4.0 * 2 * 7 / 8)


def test_slow_node_is_named_and_its_neighbours_are_not() -> None:
    reports = healthy()
    for rank, rank_report in enumerate(reports):
        rank_report.links.pairs[:] = [
            (level, other, 4.0 if 2 in (rank, other) else rate)
            for level, other, rate in rank_report.links.pairs
        ]
    named = row(network.BETWEEN, reports)
    assert (named.verdict, slow({"n1": 1.0, "n2": 0.6})) == ("warn", ["n2"])
    assert named.found.endswith("slow: n3 (rank 2)")


def test_hanging_network_names_ranks_that_others_wait_for() -> None:
    reports = healthy()
    for number, rank_report in enumerate(reports):
        rank_report.links.problem = "not finished after 60 s"
        rank_report.links.stage = "waiting for others"
        if number in (1, 2):
            rank_report.links.stage = f"round 2, {network.BETWEEN}, with rank {3 - number}"
    result = row("all-reduce", reports)
    assert result.verdict == "FAIL"
    assert result.found.startswith("n2 (rank 1): not finished after 60 s in round 2, links between")
    assert "NCCL_SOCKET_IFNAME" in result.todo


def test_memory_that_is_not_there_fails_and_is_forced() -> None:
    short = ("the run needs 9.00 GiB of GPU memory, but 8: less; no",)
    reports = changed(3, "machine", shortages=short)
    result = row("memory", reports)
    assert result.verdict == "FAIL"
    assert "n4 (rank 3)" in result.found
    assert row("memory", reports, plan={"force": True}).verdict == "warn"


def test_a_write_rate_is_bytes_over_seconds(tmp_path: Path) -> None:
    with mock.patch("tools.preflight_checks.files.time.perf_counter", side_effect=(1.0, 3.0)):
        rate = files._write_rate(tmp_path)
    assert rate == files._WRITTEN_MIB * 2**20 / 2


@pytest.mark.parametrize(("short_bytes", "verdict"), [(0, "ok"), (1, "FAIL")])
@pytest.mark.parametrize("checkpoints", [0, 2])
def test_room_is_for_one_checkpoint_more(short_bytes: int, verdict: str, checkpoints: int) -> None:
    estimate = plan().estimate
    assert estimate is not None
    export = estimate.inputs.parameters * estimate.inputs.element_bytes
    free = (3 + 1 - checkpoints) * estimate.checkpoint_bytes + export - short_bytes
    storage = replace(STORAGE, free_bytes=free, checkpoints=(0,) * checkpoints)
    reports = [replace(facts, storage=storage) for facts in healthy()]
    assert row("room", reports, save={"every": 10}).verdict == verdict


@pytest.mark.parametrize(("save", "due"), TABLES["checkpoints"])
def test_no_more_checkpoints_are_expected_than_a_run_saves(save: dict[str, Any], due: int) -> None:
    assert f"for {due} checkpoint" in row("room", healthy(), save=save).found


@pytest.mark.parametrize("folder", ["", "gone"])
def test_an_error_while_the_token_lies_there_is_not_hidden(folder: str, tmp_path: Path) -> None:
    def body() -> None:
        with token(tmp_path / folder) as path:
            assert Path(path).exists() == (not folder)
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        body()
    assert not any(tmp_path.iterdir())


def test_a_rank_that_does_not_report_is_named() -> None:
    result = row("reports", [*healthy()[:3], None])
    assert (result.verdict, result.found) == ("FAIL", "none from n4 (rank 3)")
    assert report.code([result]) == 2


def test_a_library_that_torch_lacks_is_named(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    problem = "libcudart.so.12: cannot open shared object file"
    (tmp_path / "torch/__init__.py").write_text(f"raise OSError({problem!r})")
    command = [sys.executable, REPOSITORY / "tools/preflight.py", "--environment"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"{sys.executable} cannot import torch: OSError: {problem}\n"


def test_preflight_packages_are_declared_dependencies() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    declared = {re.split("[<>=]", line)[0] for line in project["dependencies"]}
    assert set(preflight.NEEDED) - declared == {"tomllib"}


def test_ranks_are_named_by_node_and_the_rest_is_counted() -> None:
    hosts = [f"n{rank // 8}" for rank in range(64)]
    assert report.who([9, 16, 17, 18], hosts) == "n1 (rank 9), n2 (ranks 16-18)"
    assert report.who([8, 10, 11], hosts) == "n1 (ranks 8, 10-11)"
    assert report.who(range(64), hosts).endswith("n3 (ranks 24-31), and 4 more nodes")


def test_network_failure_is_reported_and_group_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Destroying it could wait forever, and would hide the failure."""

    def broken(*_: object) -> float:
        raise RuntimeError("planted\nin two lines")

    monkeypatch.setattr(network, "all_reduce_gb_per_s", broken)
    meeting = SimpleNamespace(world=World(), store=dist.HashStore())
    try:
        links, has_left = network.measure_links(meeting, ["here"], limit_s=30)
        assert links.problem == "RuntimeError: planted"
        assert links.stage == "all-reduce over all ranks"
        assert (has_left, dist.is_initialized()) == (False, True)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("hosts", "verdict", "found"), TABLES["groups"])
def test_groups_of_every_layer_need_one_node(hosts: list[str], verdict: str, found: str) -> None:
    for axis in ("tensor", "sequence"):
        rows = judge(plan({axis: 2}), hosts, healthy())
        (row,) = [row for row in rows if row.check == f"{axis} ranks"]
        assert (row.verdict, row.found) == (verdict, found)
        assert ("on each node, or set" in row.todo) == (verdict == "warn")
        assert neighbour_rows(plan({axis: 2}), hosts) == [row]
    assert neighbour_rows(plan(), hosts) == []


@pytest.mark.parametrize(("cores", "verdict"), TABLES["cores"])
def test_ranks_that_share_a_core_are_named(cores: list[list[int]], verdict: str) -> None:
    machines = {rank: replace(MACHINE, gpu_id=str(rank)) for rank in range(4)}
    machines |= {2 + n: replace(machines[2 + n], cores=tuple(own)) for n, own in enumerate(cores)}
    rows = machine_rows(plan(), machines, ["n1", "n1", "n2", "n2"], {})
    (found,) = [each for each in rows if each.check == "cores"]
    assert found.verdict == verdict
    assert ("n2 (ranks 2-3)" in found.found) == (verdict != "ok")
    assert [each.verdict for each in rows if each.check == "/dev/shm"] == ["warn"]  # for two


def test_measurements_start_when_rank_0_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_FAREWELL_S", 0.0)
    store = dist.HashStore()
    meeting = network.Meeting(World(rank=1, world_size=2), store, "n2")
    with pytest.raises(network.Absent, match="rank 0 sent nothing more"):
        meeting.together("speed", 0.0, end_s=0.0)
    store.set("speed", "true")
    meeting.together("speed", 0.0, end_s=0.0)
