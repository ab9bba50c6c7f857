"""Document boundaries: separated as transformers separates them, without a look at the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from harness.data.batch import Batch
from harness.models.attention import separating
from harness.models.initialize import materialize
from harness.models.loss import forward, token_losses
from harness.models.skeleton import hf_config, skeleton
from tests.engine.small import FAMILIES, MODEL, SEQ_LEN

CPU = torch.device("cpu")


def positions(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


ROWS = torch.stack([positions(SEQ_LEN), positions(5, 1, SEQ_LEN - 6)])


def test_documents_are_numbered_as_transformers_numbers_them() -> None:
    theirs = masking_utils.find_packed_sequence_indices
    expected = theirs(ROWS)
    with separating(documents=True):
        ours = masking_utils.find_packed_sequence_indices(ROWS)
    with separating(documents=False):
        assert masking_utils.find_packed_sequence_indices(ROWS) is None
    assert torch.equal(ours, expected)
    assert masking_utils.find_packed_sequence_indices is theirs


def test_rows_of_one_document_each_have_no_positions_on_the_device() -> None:
    ids = torch.zeros(2, SEQ_LEN, dtype=torch.int64)
    assert Batch(ids, ids, ROWS).on(CPU)[2] is ROWS
    assert Batch(ids, ids, ROWS[:1].repeat(2, 1)).on(CPU)[2] is None
    assert Batch(ids, ids, ROWS).cut(2).on(CPU)[2] is not None


class Unread(TorchDispatchMode):
    """Within this, no value of a tensor becomes a number of the host's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value is read"
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("config", [MODEL, FAMILIES["gemma3_text"]], ids=["llama", "gemma3"])
@pytest.mark.parametrize("documents", [ROWS, None], ids=["documents", "none"])
def test_a_forward_pass_reads_no_value(
    config: dict[str, Any], documents: torch.Tensor | None
) -> None:
    model = skeleton(hf_config(config), torch.float32)
    materialize(model, 0, CPU)
    ids = torch.arange(2 * SEQ_LEN).view(2, SEQ_LEN)
    expected = token_losses(
        model(input_ids=ids, position_ids=documents, use_cache=False).logits, ids
    )
    with Unread():
        with pytest.raises(AssertionError, match="a value is read"):
            model(input_ids=ids, position_ids=documents, use_cache=False)
        loss, _ = forward(model, ids, ids, documents)
    assert torch.equal(loss, expected)
