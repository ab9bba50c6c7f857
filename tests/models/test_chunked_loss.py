"""Head and cross-entropy over chunks of the vocabulary, against all logits at once."""

import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.layout.recompute import loss_chunk
from harness.models.chunked_loss import ChunkedLoss, Operations, operations_on_logits
from harness.models.loss import PLAIN, LossSetup, forward
from harness.models.skeleton import hf_config, skeleton
from harness.models.token_losses import Vocabulary, recording
from tests.gates.hold import rise
from tests.gates.models import LEARNED
from tests.models import small
from tests.models.small import gradients_of
from tests.tiers import rest_in_gate


class Peak(TorchDispatchMode):
    """Follows the bytes of storages created in the body, on any device."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.most = 0, 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        self._count((args, kwargs), made=False)
        output = function(*args, **(kwargs or {}))
        self._count(output, made=True)
        return output

    def _count(self, tensors: Any, made: bool) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._sizes:
                    size = self._sizes[storage._cdata] = storage.nbytes() if made else 0
                    self.live += size
                    weakref.finalize(storage, self._drop, storage._cdata)
        self.most = max(self.most, self.live)

    def _drop(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


class HeadAlone:
    """A head, its input and labels: everything that the loss needs."""

    def __init__(
        self,
        tokens: int,
        hidden: int,
        vocab: int,
        chunk: int,
        device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        operations: Operations = (),
    ) -> None:
        self.head = nn.Linear(hidden, vocab, bias=False, device=device, dtype=dtype)
        model: Any = SimpleNamespace(get_output_embeddings=lambda: self.head)
        self.part: Vocabulary | None = None
        self.loss = ChunkedLoss(model, chunk, operations)
        self.hidden = torch.zeros(1, tokens, hidden, device=device, dtype=dtype)
        self.hidden.requires_grad_()
        self.labels = torch.zeros(1, tokens, dtype=torch.int64, device=device)

    def run(self, trains: bool = True) -> None:
        """Run the forward pass, and the backward pass."""
        with self.loss.of(self.labels, 0.0, self.part), torch.set_grad_enabled(trains):
            output = self.head(self.hidden)
        loss = self.loss.taken(output).sum()
        if trains:
            loss.backward()


FAMILIES: dict[str, Any] = {
    **LEARNED,
    "cohere": {**LEARNED["llama"], "model_type": "cohere", "pad_token_id": 0, "logit_scale": 0.3},
    "granite": {**LEARNED["llama"], "model_type": "granite", "logits_scaling": 3.0},
    "phi": {**LEARNED["llama"], "model_type": "phi", "pad_token_id": 0},  # its head has a bias
}
CHUNK = 48  # of 128: the last one is smaller


def built(family: str, precision: str = "fp32", chunk: int = CHUNK) -> tuple[Any, LossSetup]:
    """Return a model with random weights and a chunked loss, unless `chunk` is 0."""
    model = small.built(FAMILIES[family], precision)
    if not chunk:
        return model, PLAIN
    empty = skeleton(model.config, model.dtype, model.config._attn_implementation)
    return model, LossSetup(chunked=ChunkedLoss(model, chunk, operations_on_logits(empty)))


def loss_and_gradients(
    model: Any, setup: LossSetup, smoothing: float = 0.0
) -> tuple[float, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(0, 128, (2, 32), generator=generator) for _ in range(2))
    labels[0, :5] = -100
    torch.manual_seed(1)  # a model may use dropout
    loss, auxiliary = forward(model.train(), ids, labels, None, setup, smoothing)
    (loss / 59 + (0 if auxiliary is None else auxiliary)).backward()
    return float(loss.detach()), gradients_of(model)


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return the largest relative difference between two gradients."""
    assert ours.keys() == theirs.keys()
    apart = ((ours[n].float() - g.float()).norm() / g.float().norm() for n, g in theirs.items())
    return max(map(float, apart))


SMOOTHED = [("llama", 0.1), ("gemma2", 0.1)]
CASES = rest_in_gate("models", [*SMOOTHED, *((family, 0.0) for family in FAMILIES)], 4)


@pytest.mark.parametrize(("family", "smoothing"), CASES)
def test_loss_and_gradients_are_those_of_all_logits_at_once(family: str, smoothing: float) -> None:
    expected, theirs = loss_and_gradients(*built(family, chunk=0), smoothing)
    loss, ours = loss_and_gradients(*built(family), smoothing)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert distance(ours, theirs) < 1e-5


@pytest.mark.parametrize("family", rest_in_gate("models", FAMILIES, 2))
def test_the_backward_pass_goes_through_the_models_output_first(family: str) -> None:
    """DeepSpeed clears the last micro-batch's gradients in a hook on it (BF16_Optimizer)."""
    (model, setup), order = built(family), list[str]()

    def watch(_model: Any, _args: Any, outputs: Any) -> None:
        outputs.logits.register_hook(lambda gradient: order.append("output"))

    model.register_forward_hook(watch)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: order.append("gradient"))
    loss_and_gradients(model, setup)
    assert order[:2] == ["output", "gradient"]
    assert order.count("output") == 1


@pytest.mark.parametrize("family", ["llama_tied", "gemma2", "granite", "phi"])
def test_chunked_loss_in_bf16_is_as_accurate_as_whole_logits(family: str) -> None:
    _, truth = loss_and_gradients(*built(family, chunk=0))
    expected, whole = loss_and_gradients(*built(family, "bf16", chunk=0))
    loss, chunked = loss_and_gradients(*built(family, "bf16"))
    assert loss == pytest.approx(expected, rel=1e-4)
    assert distance(chunked, truth) < 1.2 * distance(whole, truth)


def test_losses_are_recorded_by_source() -> None:
    sums = torch.zeros(2, 2, dtype=torch.float64)
    for chunk, own in zip((0, CHUNK), sums, strict=True):
        with recording(own, torch.tensor([1, 0])):
            loss, _ = loss_and_gradients(*built("llama", chunk=chunk))
        assert float(own.sum()) == pytest.approx(loss, rel=1e-6)
    assert sums[1].tolist() == pytest.approx(sums[0].tolist(), rel=1e-6)


def test_a_weight_that_is_not_trained_has_no_gradient() -> None:
    model, setup = built("phi")
    head: Any = model.get_output_embeddings()
    head.weight.requires_grad_(False)
    _, gradients = loss_and_gradients(model, setup)
    assert "lm_head.weight" not in gradients
    assert float(gradients["lm_head.bias"].norm()) > 0


def test_without_labels_the_model_has_all_its_logits() -> None:
    ids = torch.arange(8)[None]
    (model, setup), (plain, _) = built("gemma2"), built("gemma2", chunk=0)
    with torch.no_grad():
        loss, _ = forward(model.eval(), ids, ids, setup=setup)
        assert float(loss) == pytest.approx(float(forward(plain.eval(), ids, ids)[0]), rel=1e-6)
        assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_a_loss_that_the_model_fuses_has_priority() -> None:
    """As with model.kernels=liger: in training, its forward pass never calls the head."""
    (model, setup), ids = built("llama"), torch.arange(8)[None]
    fused = SimpleNamespace(logits=None, loss=torch.tensor(7.0))
    with mock.patch.object(model, "forward", return_value=fused):
        assert float(forward(model.train(), ids, ids, setup=setup)[0]) == 7
    with torch.no_grad():  # it calls the head in evaluation
        expected, _ = forward(built("llama", chunk=0)[0].eval(), ids, ids)
        loss, _ = forward(model.eval(), ids, ids, setup=setup)
        assert float(loss) == pytest.approx(float(expected))


def operations_with(change: Any) -> Operations:
    """Return the operations on the logits of a Llama with one more change."""
    model = skeleton(hf_config(LEARNED["llama"]), torch.float32)
    own = model.forward

    def changed(**keywords: Any) -> Any:
        outputs = own(**keywords)
        outputs.logits = change(outputs.logits)
        return outputs

    model.forward = changed
    return operations_on_logits(model)


def test_logits_that_depend_on_each_other_are_not_chunked() -> None:
    assert [len(o.args) for o in operations_with(lambda x: torch.tanh(x / 3).double())] == [1, 0, 0]
    for change in (
        lambda x: x.log_softmax(-1),
        lambda x: x - x.mean(-1, keepdim=True),
        lambda x: x.index_fill(-1, torch.zeros(1, dtype=torch.int64, device="meta"), 0.0),
        lambda x: x * torch.ones(x.shape[-1], device="meta"),
        lambda x: x.mul_(2),
        lambda x: x[..., :64],
    ):
        with pytest.raises(ValueError, match="LlamaForCausalLM computes its logits with aten"):
            operations_with(change)
    with pytest.raises(ValueError, match="are not those of its output head"):
        operations_with(lambda x: torch.empty(1, 4, 128, device="meta"))


def test_chunked_loss_names_unsupported_heads() -> None:
    model = skeleton(hf_config(LEARNED["llama"]), torch.float32)
    model.set_output_embeddings(nn.Sequential(model.get_output_embeddings()))
    with pytest.raises(ValueError, match=r"output head of LlamaForCausalLM is not an nn\.Linear"):
        operations_on_logits(model)


def test_a_chunk_is_used_where_logits_are_large() -> None:
    assert loss_chunk(None, 128_256, 2048) == 0  # 0.98 GiB
    assert loss_chunk(None, 128_256, 8192) == 8192  # 256 MiB
    assert loss_chunk(None, 128_256, 2**20) == 128
    assert loss_chunk(0, 128_256, 8192) == 0
    assert loss_chunk(5, 10, 1) == 5


GIB = 2**30


def test_the_peak_of_8192_tokens_and_a_vocabulary_of_128256() -> None:
    tokens, hidden, vocab = 8192, 4096, 128_256
    chunk = loss_chunk(None, vocab, tokens)
    head = HeadAlone(tokens, hidden, vocab, chunk, "meta")
    with Peak() as peak:
        head.run()
    assert peak.most < 1.5 * GIB
    # The head's gradient; a chunk's gradient in fp32 and bf16; the hidden states' gradient in fp32.
    parts = 2 * vocab * hidden + (4 + 2) * chunk * tokens + 4 * tokens * hidden
    assert parts <= peak.most < 1.001 * parts


@pytest.mark.gate("models")
def test_chunked_loss_live_bytes_on_a_cpu() -> None:
    """An eighth of the sizes above."""
    tokens, hidden, vocab = 1024, 512, 16_032
    head = HeadAlone(tokens, hidden, vocab, 1024)
    with rise() as rose:
        head.run()
    assert 2 * vocab * hidden < rose.bytes < 1.5 * GIB / 64
