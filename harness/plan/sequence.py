"""Sequence parallelism in a plan: rows and heads divide, and nothing is asked that would not."""

from __future__ import annotations

from collections.abc import Iterator

from harness.layout.division import tensor_problems
from harness.layout.families import family_of
from harness.layout.sequence import sequence_problems
from harness.plan.draft import Draft
from harness.plan.plan import NOT_TRAINED
from harness.plan.ranks import left_of

_KEY = "sequence_parallel_size"


def divide_sequences(draft: Draft) -> None:
    """Require that the ranks can divide every row, and take the key out of the JSON: DeepSpeed's
    own attention would lose the documents.
    """
    if draft.grid.sequence > 1:
        for why in _problems(draft, draft.grid.sequence):
            if draft.estimating:
                draft.note(NOT_TRAINED, draft.problems.worded(_KEY, why))
            else:
                draft.problems.add(_KEY, why)
    draft.ds.drop(_KEY)


def _problems(draft: Draft, places: int) -> Iterator[str]:
    run = draft.config
    if run.model.kernels != "none":
        yield f"it is not built with model.kernels={run.model.kernels}: remove one of them"
    if draft.shape is not None:
        shortest = run.data.seq_len // draft.curriculum.most_pieces
        ranks = left_of(draft.world, draft.grid, "pipeline", "tensor")
        # Heads that tensor ranks cannot divide are theirs to report.
        tensor = 1 if tensor_problems(draft.shape, draft.grid.tensor) else draft.grid.tensor
        key = "data.seq_len" if shortest == run.data.seq_len else "ramp.length_from"
        unit = f"tokens ({key})"
        yield from sequence_problems(draft.shape, places, shortest, tensor, ranks, unit)
    elif draft.model_config and not family_of(draft.model_config["model_type"]).divides_rows:
        # The first batch would not tell: small states of a recurrent layer hide in its rounding.
        yield f"nobody has divided the rows of {draft.model_config['model_type']}: use 1"
