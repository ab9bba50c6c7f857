"""The DeepSpeed JSON: its file, its keys and their aliases, overrides, and rules."""

import json
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from harness.config.ds_check import check_keys, rules
from harness.config.ds_json import (
    DsJson,
    ds_keys,
    first_name,
    literal,
    load_ds_json,
    normalized,
    offloaded_to,
    read_ds_json,
    value_of,
)
from harness.errors import ConfigError, Problems
from tests.tables import beside

TABLES = beside(__file__, "ds_json.toml")

REPOSITORY = Path(__file__).resolve().parents[2]
STAGE = "zero_optimization.stage"
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}


def ds_json(**tree: Any) -> DsJson:
    return DsJson(tree, "ds.json")


def check(ds: DsJson) -> list[str]:
    problems = Problems(ds.look_up)
    check_keys(ds, problems)
    return list(problems)


# The file.


def test_ds_json_is_read_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"a": [1, {"b": 2e3}], "c": {"d": null}}', encoding="utf-8-sig")
    assert read_ds_json(path) == {"a": [1, {"b": 2000.0}], "c": {"d": None}}
    assert type(read_ds_json(path)["c"]) is dict


@pytest.mark.parametrize(("text", "expected"), TABLES["invalid"])
def test_invalid_json_has_a_position(text: str | None, expected: list[str], tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_ds_json(path)
    for problem, part in zip(caught.value.problems, expected, strict=True):
        assert part in problem


def test_folder_as_ds_json_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_ds_json(tmp_path)


def test_ds_assignment_overrides_the_file_under_any_alias(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"bfloat16": {"enabled": false}, "train_batch_size": 8}')
    ds, problems = load_ds_json(path, ["bf16.enabled=true", "a"])
    assert problems == ["ds.'a' is not key=value, as in train.steps=100 (command line)"]
    assert ds.tree == {"bf16": {"enabled": True}, "train_batch_size": 8}
    assert ds.origin("train_batch_size") == str(path)
    assert ds.origin("bf16.enabled") == "command line"
    assert ds.origin("zero_optimization.stage3_max_live_parameters") == str(path)
    whole = DsJson({}, "ds.json", {"fp16": {}, "zero_optimization.stage": 3})
    assert whole.origin("zero_optimization.stage3_max_live_parameters") == "ds.json"
    assert whole.origin("fp16.enabled") == "command line"


# Its keys.


def test_ds_json_distinguishes_literals_from_auto() -> None:
    ds = {"fp16": {"enabled": "auto", "loss_scale": 8}, "gradient_clipping": None}
    assert (literal(ds, "fp16.enabled"), value_of(ds, "fp16.enabled")) == (None, False)
    assert (literal(ds, "fp16.loss_scale"), value_of(ds, "fp16.loss_scale")) == (8, 8)
    assert (literal(ds, "bf16.enabled"), value_of(ds, "gradient_clipping")) == (None, 1.0)
    for zero, device in (({}, "none"), ({"offload_optimizer": None}, "none"), (OFFLOADED, "cpu")):
        ds = {"zero_optimization": zero}
        assert (offloaded_to(ds, "optimizer"), offloaded_to(ds, "param")) == (device, "none")


@pytest.mark.gate("plan")
def test_the_table_of_keys_is_what_the_installed_deepspeed_says() -> None:
    code = "from tests.gates import generate_ds_keys; print(generate_ds_keys.as_text(), end='')"
    fresh = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert json.loads(fresh) == ds_keys()
    size = (REPOSITORY / "harness" / "config" / "ds_keys.json").stat().st_size
    assert size < 300 * 1024


def test_the_table_holds_what_deepspeeds_documentation_shows() -> None:
    """Checked by hand, so that a generator that finds nothing cannot pass."""
    documented = beside(__file__, "ds_json.toml")["documented"]
    assert {key: value_of({}, key) for key in documented} == documented


@pytest.mark.parametrize("row", beside(__file__, "ds_json.toml")["json"])
def test_a_json_is_read_as_deepspeed_reads_it(row: dict[str, Any]) -> None:
    ds = DsJson(deepcopy(row["written"]), "ds.json")
    assert check(ds) == []
    assert ds.tree == row.get("read", row["written"])
    messages = [event["message"] for event in ds.events]
    assert len(messages) == ("note" in row)
    assert row.get("note", "") in "".join(messages)


def test_every_other_name_of_a_key_leads_to_it() -> None:
    def others(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
        for name, node in section.get("keys", {}).items():
            if "same_as" in node:
                yield prefix + name, prefix + node["same_as"]
            yield from others(node, f"{prefix}{name}.")

    pairs = dict(others(ds_keys()))
    assert len(pairs) > 10
    assert {name: first_name(name) for name in pairs} == pairs


@pytest.mark.parametrize(
    ("tree", "start", "end"),
    [*TABLES["alone"],
     *(({key: {"enabled": True}}, f"{key} (ds.json): {node['removed']}", "")
       for key, node in ds_keys()["keys"].items() if "removed" in node)],
)  # fmt: skip
def test_what_a_file_alone_can_get_wrong(tree: dict[str, Any], start: str, end: str) -> None:
    (problem,) = check(DsJson(tree, "ds.json"))
    assert problem.startswith(start)
    assert "removed" not in problem or "Remove it" in problem
    assert problem.endswith(end)


def test_invalid_ds_keys_are_removed_and_the_rest_is_kept() -> None:
    tree = {"fp16": {"enabled": 1, "loss_scale": 8}, "zero_optimization": {"stage": 2}, "x": 1}
    ds = DsJson(tree, "ds.json", {STAGE: 2})
    first, *more = check(ds)
    assert first.startswith("fp16.enabled is 1 (ds.json): it must be boolean")
    assert len(more) == 1
    assert ds.rejected == {"fp16.enabled", "x"}
    assert ds.tree == {"fp16": {"loss_scale": 8}, "zero_optimization": {"stage": 2}}


# Overrides.


def test_whole_numbers_become_integers_in_a_copy() -> None:
    tree = {"a": {"b": 5e8, "c": [1.0, 0.5]}, "d": float("inf"), "e": True}
    copy = normalized(tree)
    assert copy == tree
    assert normalized({"stage": "Auto"}) == {"stage": "auto"}
    assert type(copy["a"]["b"]) is int
    assert copy["a"] is not tree["a"]


@pytest.mark.parametrize("tree", [{"zero_optimization": {"stage": 0}}, {}])
def test_ds_value_that_replaces_another_is_an_event(tree: dict[str, Any]) -> None:
    ds = DsJson(tree, "ds.json")
    ds.set(STAGE, 1, "0 is wrong")
    message = f"{STAGE} is 1, not 0 (ds.json): 0 is wrong"
    event = {"kind": "changed", "json_key": STAGE, "was": 0, "value": 1, "message": message}
    assert ds.events == [event]
    assert ds.value(STAGE) == 1
    assert ds.given == tree


@pytest.mark.parametrize("tree", [{}, {"train_batch_size": "auto"}, {"train_batch_size": 8}])
def test_a_value_filled_in_for_auto_or_nothing_is_no_event(tree: dict[str, Any]) -> None:
    ds = DsJson(tree, "ds.json")
    ds.fill("train_batch_size", 8)
    assert (ds.literal("train_batch_size"), ds.events) == (8, [])


def test_event_lists_every_literal_replaced_in_a_ds_section() -> None:
    ds = ds_json(optimizer={"type": "Adam", "params": {"lr": "auto", "eps": 1, "foreach": True}})
    ds.fill("optimizer", {"type": "AdamW", "params": {"lr": 2, "eps": 1}}, "ours")
    assert [event["message"] for event in ds.events] == [
        "optimizer.type is 'AdamW', not 'Adam' (ds.json): ours",
        "optimizer.params.foreach is left out, not True (ds.json): ours",
    ]


def test_keys_left_out_for_one_reason_share_a_note() -> None:
    ds = ds_json(_a=1, _b=2, fp16={"_c": 3, "enabled": True})
    for key in ("_a", "_b", "fp16._c", "absent"):
        ds.remove(key, "a comment")
    assert [event["message"] for event in ds.events] == ["_a, _b, fp16._c (ds.json): a comment"]
    assert ds.tree == {"fp16": {"enabled": True}}


def test_ds_key_that_contains_a_dot_is_not_split() -> None:
    ds = DsJson({STAGE: 2, "zero_optimization": {"stage": 3}}, "ds.json")
    ds.reject(STAGE)
    assert ds.tree == {"zero_optimization": {"stage": 3}}


def test_ds_auto_values_are_resolved() -> None:
    ds = ds_json(fp16="auto", bf16={"enabled": "auto"}, train_batch_size=1)
    keys = ("fp16", "fp16.enabled", "bf16.enabled", "train_batch_size", "steps_per_print")
    assert [ds.is_auto(key) for key in keys] == [True, False, True, False, False]
    ds.drop("bf16.enabled")
    assert (ds.tree["bf16"], ds.events) == ({}, [])


def test_resolving_a_ds_json_changes_no_input() -> None:
    ds = ds_json(fp16={"enabled": True})
    ds.resolved()["fp16"]["enabled"] = False
    assert ds.value("fp16.enabled") is True


def test_ds_rejection_rules_name_keys_that_deepspeed_knows() -> None:
    for rule in rules():
        assert rule.keys() <= {"key", "why", "when", "unless", "on", "instead", "left_out"}
        conditions = {**rule.get("when", {}), **rule.get("unless", {})}
        assert conditions or "left_out" in rule, rule
        for key in (*rule.get("left_out", [rule.get("key")]), *conditions):
            value_of({}, key)
