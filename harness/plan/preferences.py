"""Settings of a run on preference pairs (train.objective): defaults, and what it cannot be combined
with.
"""

from collections.abc import Iterator

from harness.config.assignments import IMPLIED
from harness.config.sections import NEXT_TOKEN, REFERENCE_FREE
from harness.files.preferences import REJECTED
from harness.plan.plan import Draft

_DEFAULTS = {"data.document_mask": True, "data.too_long": "drop", "data.reservoir": 0}


def decide_preferences(draft: Draft) -> None:
    """Fill in what pairs need where the user left it open; reject what they cannot have."""
    config, train = draft.config, draft.config.train
    if not train.preferences:
        for key, is_set in _of_pairs_alone(draft):
            if is_set:
                why = f"but train.objective={NEXT_TOKEN} compares no pairs"
                draft.problems.add(key, why, "set train.objective=dpo, or leave it out")
        return
    problems = [(key, why, use) for key, is_on, why, use in _obstacles(draft) if is_on]
    for problem in problems:
        draft.problems.add(*problem)
    if not problems:
        defaults = {key: value for key, value in _DEFAULTS.items() if not config.is_set(key)}
        draft.decide(defaults, IMPLIED)
    if train.objective not in REFERENCE_FREE and config.model.init_from is None:
        message = (
            f"train.objective={train.objective} compares with the initial weights, which are "
            "random: set model.init_from to a tuned model"
        )
        draft.note("random_reference", message)


def _of_pairs_alone(draft: Draft) -> Iterator[tuple[str, bool]]:
    """Yield each key that only pairs have, and whether it is set."""
    train = draft.config.train
    yield "data.columns", REJECTED in draft.config.data.columns
    yield "train.beta", train.beta is not None
    yield "train.margin", train.margin is not None
    yield "train.sft_weight", train.sft_weight > 0


def _obstacles(draft: Draft) -> Iterator[tuple[str, bool, str, str]]:
    """Yield each key that pairs cannot be combined with, whether it is on, why, and what to do."""
    config = draft.config
    data, train, given = (
        config.data,
        config.train,
        f"but train.objective is {config.train.objective}",
    )
    whole = f"{given}: both sides of a pair stand in one window"
    yield "data.document_mask", data.document_mask is False, whole, "leave it out"
    yield "data.packing", data.packing == "stream", whole, "leave it out"
    cut = f"{given}, and a cut pair would compare answers of unlike ends"
    cuts = data.too_long == "cut" and config.is_set("data.too_long")
    yield "data.too_long", cuts, cut, "use drop or refuse, and raise data.seq_len"
    prompt = f"{given}: the prompt that both sides share is not compared"
    yield "data.learn", data.learn == "all", prompt, "leave it out"
    unlike = f"{given}, whose loss is not of tokens"
    yield "train.label_smoothing", train.label_smoothing > 0, unlike, "use 0"
    yield "train.loss", train.loss != "cross_entropy", unlike, "leave it out"
    yield "ramp.length_from", config.ramp.length_from is not None, whole, "leave it out"
    yield "train.carry_state", train.carry_state, whole, "use false"
    old = f"{given}, and old data is no pairs"
    yield "data.rehearse", data.rehearse is not None, old, "leave it out"
    yield "eval.needle_lengths", bool(config.eval.needle_lengths), unlike, "leave it out"
    yield "eval.seq_len", config.eval.seq_len is not None, whole, "leave it out"
    margin = f"{given}, which has no margin"
    is_given = train.margin is not None and train.objective != "simpo"
    yield "train.margin", is_given, margin, "leave it out, or use simpo"
