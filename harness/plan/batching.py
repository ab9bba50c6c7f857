"""Micro-batches by length in a plan (data.batching), and its checks."""

from __future__ import annotations

from harness.layout.families import SIZE_KEYS
from harness.plan.draft import Draft
from harness.plan.pipeline import num_stages

_KEY = "data.batching"


def decide_batching(draft: Draft) -> None:
    """Take the micro-batch from data.tokens_per_batch; refuse what needs samples of one length."""
    data, problems = draft.config.data, draft.problems
    if data.batching == "packed":
        return
    needs = {
        "pipeline.stages": num_stages(draft.ds.tree) > 1,
        "model.compile": draft.config.model.compile,
        "ramp.length_from": draft.config.ramp.length_from is not None,
        "train.tokens": draft.config.train.tokens is not None,
    }
    for key, why in (
        ("pipeline.stages", "stages exchange tensors of one shape: use ZeRO 3 instead of stages"),
        ("model.compile", "every length would be compiled anew: remove model.compile"),
        ("ramp.length_from", "documents would be cut: remove ramp.length_from"),
        (
            "train.tokens",
            "a step's tokens depend on its documents: set train.steps or train.epochs",
        ),
    ):
        if needs[key]:
            why = f"but with {key} ({_origin(draft, key)}) {why}, or use {_KEY}=packed"
            problems.add(_KEY, why)
    _set_micro_batch(draft)


def mark_padding(draft: Draft) -> None:
    """Tell padding from tokens for the routers of experts, unless the user decides."""
    data = draft.config.data
    has_experts = any(isinstance(draft.model_config.get(key), int) for key in SIZE_KEYS["experts"])
    if data.batching == "packed" or data.document_mask is not None or not has_experts:
        return
    marked = data.model_copy(update={"document_mask": True})
    draft.config = draft.config.model_copy(update={"data": marked})
    draft.note("marked_padding", "data.document_mask is true: routers are not balanced by padding")


def _set_micro_batch(draft: Draft) -> None:
    data, train = draft.config.data, draft.config.train
    if data.tokens_per_batch is None:
        return
    micro_batch = data.tokens_per_batch // data.seq_len
    if train.micro_batch not in (None, micro_batch):
        why = f"which makes micro-batches of {micro_batch} windows of data.seq_len {data.seq_len}"
        other = f"train.micro_batch is {train.micro_batch} ({_origin(draft, 'train.micro_batch')})"
        draft.problems.add("data.tokens_per_batch", f"{why}, but {other}", "remove one of them")
    changed = train.model_copy(update={"micro_batch": micro_batch})
    draft.config = draft.config.model_copy(update={"train": changed})


def _origin(draft: Draft, key: str) -> str:
    """Return the origin of a key of either file."""
    return draft.asked([key]).rpartition(": ")[2]
