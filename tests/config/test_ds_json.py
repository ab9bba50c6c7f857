from __future__ import annotations

import pytest

from harness.config.ds_json import DsJson, normalized

STAGE = "zero_optimization.stage"


def ds_json(**tree):
    return DsJson(tree, "ds.json")


def test_a_value_set_on_the_command_line_is_said_to_come_from_there():
    ds = DsJson({}, "ds.json", {STAGE, "fp16"})
    assert ds.origin(STAGE) == ds.origin("fp16.enabled") == "command line"
    assert ds.origin("zero_optimization.stage3_max_live_parameters") == "ds.json"


def test_whole_numbers_become_integers_in_a_copy():
    tree = {"a": {"b": 5e8, "c": [1.0, 0.5]}, "d": float("inf"), "e": True}
    copy = normalized(tree)
    assert copy == tree
    assert type(copy["a"]["b"]) is int
    assert copy["a"] is not tree["a"]


def test_a_value_set_instead_of_another_is_an_event():
    ds = ds_json(zero_optimization={"stage": 0})
    ds.set(STAGE, 1, "0 is wrong")
    message = f"{STAGE} is 1, not 0 (ds.json): 0 is wrong"
    event = {"kind": "changed", "json_key": STAGE, "was": 0, "value": 1, "message": message}
    assert ds.events == [event]
    assert ds.value(STAGE) == 1
    assert ds.given == {"zero_optimization": {"stage": 0}}


def test_a_default_set_to_another_value_is_an_event():
    ds = ds_json()
    ds.set(STAGE, 1, "the default is wrong")
    assert [(event["was"], event["value"]) for event in ds.events] == [(0, 1)]


@pytest.mark.parametrize("tree", [{}, {"train_batch_size": "auto"}, {"train_batch_size": 8}])
def test_a_value_filled_in_for_auto_or_nothing_is_no_event(tree):
    ds = ds_json(**tree)
    ds.fill("train_batch_size", 8)
    assert (ds.literal("train_batch_size"), ds.events) == (8, [])


def test_every_literal_that_a_filled_in_section_changes_is_an_event():
    ds = ds_json(optimizer={"type": "Adam", "params": {"lr": "auto", "eps": 1, "foreach": True}})
    ds.fill("optimizer", {"type": "AdamW", "params": {"lr": 2, "eps": 1}}, "ours")
    assert [event["message"] for event in ds.events] == [
        "optimizer.type is 'AdamW', not 'Adam' (ds.json): ours",
        "optimizer.params.foreach is left out, not True (ds.json): ours",
    ]


def test_keys_left_out_for_one_reason_share_a_note():
    ds = ds_json(_a=1, _b=2, fp16={"_c": 3, "enabled": True})
    for key in ("_a", "_b", "fp16._c", "absent"):
        ds.remove(key, "a comment")
    assert [event["message"] for event in ds.events] == ["_a, _b, fp16._c (ds.json): a comment"]
    assert ds.tree == {"fp16": {"enabled": True}}


def test_a_key_with_a_dot_in_its_name_is_not_the_key_that_it_looks_like():
    ds = DsJson({STAGE: 2, "zero_optimization": {"stage": 3}}, "ds.json")
    ds.reject(STAGE)
    assert ds.tree == {"zero_optimization": {"stage": 3}}


def test_auto():
    ds = ds_json(fp16="auto", bf16={"enabled": "auto"}, train_batch_size=1)
    keys = ("fp16", "fp16.enabled", "bf16.enabled", "train_batch_size", "steps_per_print")
    assert [ds.is_auto(key) for key in keys] == [True, False, True, False, False]
    ds.drop("bf16.enabled")
    assert (ds.tree["bf16"], ds.events) == ({}, [])


def test_the_resolved_copy_is_nobody_elses():
    ds = ds_json(fp16={"enabled": True})
    ds.resolved()["fp16"]["enabled"] = False
    assert ds.value("fp16.enabled") is True
