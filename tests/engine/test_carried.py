"""States carried from window to window. Without an engine: rows that continue and rows that begin
with zeros. In the real engine on two ranks: comparisons with loops whose gradients end where
windows begin, over single tokens or with transformers' own cache.
"""

import itertools
import json
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.func import functional_call
from torch.nn import functional
from transformers import DynamicCache

from harness.data.batch import Batch
from harness.data.batches import Contiguous, HeldOutText
from harness.data.packing import Packed
from harness.data.pair import NO_MASKS, IndexedTokens, write_indexed
from harness.data.split import load_split, write_splits
from harness.engine.api import Engine
from harness.engine.forward import CarriedStates
from harness.layout.world import World
from harness.models.loss import forward
from harness.models.recurrent_state import MAMBA2_CACHE
from harness.models.skeleton import hf_config, skeleton
from harness.run.saving import loss_of, texts_of
from tests.engine.engines import cells, engine_of, fp16, gathered, plan_of, written
from tests.engine.small import SEQ_LEN, VOCAB_SIZE, run_config
from tests.gates.worker import held_out_loss
from tests.models.small import built
from tests.ranks import ranks

_SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2}
_SIZES |= {"tie_word_embeddings": False}
MODEL: dict[str, Any] = dict(_SIZES, model_type="recurrent", cell="lstm", recurrent_size=24)
ROWS, WINDOWS, STEPS = 8, 3, 5
"""Rows of a batch; windows per row and epoch; steps, enough to begin a second epoch."""
# Three windows begin with a document, one of them a row's second; other documents begin within
# windows.
STARTS = (0, 30, 4 * SEQ_LEN, 100, 9 * SEQ_LEN, 15 * SEQ_LEN, 301)


@cache
def text() -> list[int]:
    tokens = ROWS * WINDOWS * SEQ_LEN + 1
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, VOCAB_SIZE, (tokens,), generator=generator).tolist()


@cache
def stream(starts: tuple[int, ...] = STARTS) -> Contiguous:
    """Return the text, divided into documents."""
    folder, ids = Path(tempfile.mkdtemp()), text()
    ends = (*starts[1:], len(ids))
    documents = ((ids[a:b], True) for a, b in zip(starts, ends, strict=True))
    write_indexed(folder / "tokens", VOCAB_SIZE, documents)
    tokens = IndexedTokens(folder / "tokens")
    write_splits(folder, tokens, NO_MASKS, None, add_separator=False)
    options = {"seq_len": SEQ_LEN, "eos_id": 0, "vocab_size": VOCAB_SIZE, "add_separator": False}
    packed = Packed(tokens.ids, load_split(folder, "train"), NO_MASKS, **options)  # type: ignore[arg-type]
    return Contiguous(packed, ROWS)


MAMBA2: dict[str, Any] = dict(
    _SIZES | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    **dict.fromkeys(("state_size", "num_heads", "head_dim", "chunk_size"), 8),
    model_type="mamba2",
    n_groups=2,
)


class TokenLoop:
    """The same model as a loop over tokens; it shares only the weights with the harness."""

    def __init__(self, weights: dict[str, torch.Tensor], cell: str) -> None:
        self.weights = {name: w.clone().requires_grad_() for name, w in weights.items()}
        self.is_lstm = cell == "lstm"
        self.states: dict[int, Any] = {}

    def loss(self, step: int) -> torch.Tensor:
        """Return the mean loss of a step; its gradients end where its windows begin."""
        total = torch.zeros(())
        for row in range(ROWS):
            begin = (row * WINDOWS + step % WINDOWS) * SEQ_LEN
            if step % WINDOWS == 0 or begin in STARTS:
                self.states.pop(row, None)
            total = total + self._window(row, text()[begin : begin + SEQ_LEN + 1])
        return total / (ROWS * SEQ_LEN)

    def step(self, lr: float) -> None:
        for weight in self.weights.values():
            assert weight.grad is not None
            with torch.no_grad():
                weight -= lr * weight.grad
            weight.grad = None

    def _window(self, row: int, ids: list[int]) -> torch.Tensor:
        w = self.weights
        before = self.states.get(row) or [[torch.zeros(1, 24)] * 2 for _ in range(2)]
        states = [[part.detach() for part in layer] for layer in before]
        loss = torch.zeros(())
        for token, target in itertools.pairwise(ids):
            hidden = w["model.embed_tokens.weight"][token][None]
            for layer in range(2):
                hidden = hidden + self._layer(f"model.layers.{layer}.", hidden, states[layer])
            logits = self._norm("model.norm.", hidden) @ w["lm_head.weight"].T
            loss = loss + functional.cross_entropy(logits, torch.tensor([target]))
        self.states[row] = states
        return loss

    def _layer(self, name: str, hidden: torch.Tensor, state: list[torch.Tensor]) -> torch.Tensor:
        parts = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        cell = [self.weights[f"{name}cell.{part}"] for part in parts]
        inputs = self._norm(f"{name}norm.", hidden)
        if self.is_lstm:
            state[:] = torch.lstm_cell(inputs, state, *cell)
        else:
            state[0] = torch.gru_cell(inputs, state[0], *cell)
        return state[0] @ self.weights[f"{name}out_proj.weight"].T

    def _norm(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weights[f"{name}weight"], self.weights[f"{name}bias"]
        return functional.layer_norm(hidden, hidden.shape[-1:], weight, bias)


class CacheLoop(TokenLoop):
    """A transformers model as a loop over rows, each with transformers' own cache."""

    def __init__(self, model: Any) -> None:
        super().__init__({name: w.detach() for name, w in model.named_parameters()}, "")
        self.model = model

    def _window(self, row: int, ids: list[int]) -> torch.Tensor:
        cache = self.states.setdefault(row, DynamicCache(config=self.model.config))
        for layer in cache.layers:
            for states in (layer.conv_states, layer.recurrent_states):
                states.update({k: v.detach().clone() for k, v in states.items() if v is not None})
        tokens = torch.tensor(ids)
        arguments = {"input_ids": tokens[None, :-1], MAMBA2_CACHE: cache, "use_cache": True}
        logits = functional_call(self.model, self.weights, (), arguments).logits[0]
        return functional.cross_entropy(logits, tokens[1:], reduction="sum")


NUMBERS = 2 * 2 * 24


@pytest.fixture
def states(tmp_path: Path) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))

    def build(rank: int = 0, ranks: int = 2, global_batch: int = 8, micro_batch: int = 2) -> Any:
        sizes = {"global_batch": global_batch, "micro_batch": micro_batch, "carry_state": True}
        config = run_config(tmp_path, train=sizes)
        plan = plan_of(config, {}, World(rank, ranks, rank, ranks))
        model = skeleton(hf_config(plan.model_config), torch.float32)
        return CarriedStates(plan, model, torch.device("cpu"))

    return build


def batch(windows: list[int], goes_on: bool = True) -> Batch:
    ids = torch.zeros(len(windows), 4, dtype=torch.int64)
    flags = torch.full((len(windows),), goes_on)
    return Batch(ids, ids, None, windows=torch.tensor(windows), goes_on=flags)


def behind(value: float, rows: int = 2) -> Any:
    return SimpleNamespace(after=torch.full((rows, NUMBERS), value))


def begun(states: CarriedStates, number: int, rows: Batch) -> list[float]:
    """Return the first number of the state with which each row of a micro-batch begins."""
    values = states.before(number, rows).keywords["carried"].before.flatten(1)
    assert values.shape[1] == NUMBERS
    assert (values == values[:, :1]).all()
    return values[:, 0].tolist()


def test_carried_state_stays_within_its_row(states: Any) -> None:
    own = states()
    assert begun(own, 0, batch([5, 9])) == [0, 0]
    own.keep(0, batch([5, 9]), behind(3.0))
    assert begun(own, 0, batch([6, 10])) == [3, 3]
    assert begun(own, 1, batch([6, 10])) == [0, 0]  # another micro-batch
    assert begun(own, 0, batch([6, 10], goes_on=False)) == [0, 0]  # a document begins
    assert begun(own, 0, batch([5, 12])) == [0, 0]  # an epoch begins; samples were skipped
    assert begun(own, 0, batch([6, 10])) == [3, 3]
    spoiled = behind(2.0)
    spoiled.after[1, 50] = torch.inf  # a state that is not finite is dropped
    own.keep(0, batch([0, 9]), spoiled)
    assert begun(own, 0, batch([1, 10])) == [2, 0]


def test_carried_states_are_saved_by_row(states: Any) -> None:
    saved: dict[tuple[str, str], torch.Tensor] = {}
    for rank in range(2):
        own = states(rank)
        for number in range(2):
            windows = [100 * rank + 10 * number, 100 * rank + 10 * number + 1]
            own.keep(number, batch(windows), behind(float(windows[0])))
        for fragment in own.fragments():
            ((kind, tensor),) = fragment.tensors.items()
            empty = tensor.new_full((fragment.part.numel,), 77)
            whole = saved.setdefault((fragment.name, kind), empty)
            whole[fragment.offset : fragment.offset + tensor.numel()] = tensor

    def fill(name: str, kind: str, offset: int, out: torch.Tensor, part: Any) -> None:
        out.copy_(saved[name, kind][offset : offset + out.numel()])

    def kinds(name: str) -> list[str]:
        return [kind for saved_name, kind in saved if saved_name == name]

    alone = states(ranks=1, micro_batch=4)
    alone.restore(fill, kinds)
    # Micro-batches are dealt to the ranks in turn: rows 0 and 1 to rank 0, 2 and 3 to rank 1.
    assert begun(alone, 0, batch([1, 2, 101, 102])) == [0, 0, 100, 100]
    assert begun(alone, 1, batch([11, 12, 111, 112])) == [10, 10, 110, 110]
    other = states(ranks=1, global_batch=4, micro_batch=2)  # different rows
    other.keep(0, batch([4, 5]), behind(1.0))
    other.restore(fill, kinds)
    assert begun(other, 0, batch([5, 6])) == [0, 0]


LR = 0.05
SGD = {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0, "clip_norm": 0.0}
MODELS = {"lstm": MODEL, "gru": {**MODEL, "cell": "gru"}, "mamba2": MAMBA2}
CELLS: dict[str, dict[str, Any]] = {
    **{f"lstm-zero{number}": {"ds": f"zero{number}"} for number in range(3)},
    "lstm-zero3_offload": {"ds": "zero3 offload_all"},
    **{f"{kind}-full_zero3": {"ds": "zero3", "checkpointing": "full"} for kind in MODELS},
}


def carrying(ds: Any, kind: str = "lstm", **model: Any) -> Any:
    """Build an engine that carries states. Collective."""
    model |= {"name": written(kind, MODELS[kind]), "attention": "eager"}
    return engine_of(ds, model=model, train={"carry_state": True}, optim=SGD)


def share(engine: Engine, step: int, starts: tuple[int, ...] = STARTS) -> tuple[list[Batch], int]:
    """Return this rank's micro-batches of a step, and the total number of targets."""
    plan, own = engine.plan, engine.plan.share
    reads = plan.curriculum.at(step * ROWS), plan.micro_batch, own.data_rank, own.data_ranks
    return stream(starts).micro_batches(*reads), ROWS * SEQ_LEN


def loss(engine: Engine, step: int) -> float:
    result = engine.train_batch(*share(engine, step), LR)
    return float(engine.sum_over_ranks(result.loss_share.clone()))


def plain_model(kind: str) -> Any:
    """Return the engine's model as transformers computes it."""
    return built(MODELS[kind], attention="eager").eval()


def loop_of(kind: str) -> TokenLoop:
    model = plain_model(kind)
    if kind == "mamba2":
        return CacheLoop(model.train())
    return TokenLoop({name: w.detach() for name, w in model.named_parameters()}, kind)


@pytest.fixture
def by_loop(cell: str) -> tuple[list[float], dict[str, Any]]:
    """Return the losses of a loop's steps, and the gradients of the next step."""
    loop = loop_of(cell.partition("-")[0])
    losses = []
    for step in range(STEPS):
        loss = loop.loss(step)
        loss.backward()
        losses.append(loss.item())
        loop.step(LR)
    loop.loss(STEPS).backward()
    return losses, {name: weight.grad for name, weight in loop.weights.items()}


@pytest.mark.parametrize("cell", cells(CELLS, ("lstm-zero2",)))
@ranks(2)
def test_carried_state_layouts_learn_as_a_plain_loop(
    cell: str, by_loop: tuple[list[float], dict[str, Any]]
) -> None:
    """An evaluation runs between two steps."""
    losses, expected = by_loop
    engine = carrying(kind=cell.partition("-")[0], **CELLS[cell])
    for step in range(STEPS):
        if step == 1:
            engine.eval_batch(share(engine, 0)[0])
        assert loss(engine, step) == pytest.approx(losses[step], rel=1e-5)
    engine.accumulate(*share(engine, STEPS))
    gradients = dict(engine.gradients())
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


@ranks(2)
def test_windows_with_a_carried_state_are_one_long_window() -> None:
    """Each row is one document, and weights do not change."""
    engine, losses = carrying("zero3"), []
    whole = [share(engine, step, (0,))[0] for step in range(WINDOWS)]
    for batches in whole:
        result = engine.train_batch(batches, ROWS * SEQ_LEN, 0.0)
        losses.append(float(engine.sum_over_ranks(result.loss_share.clone())))
    long = []
    for windows in zip(*whole, strict=True):
        ids, labels = (
            torch.cat([getattr(w, name) for w in windows], 1) for name in ("input_ids", "labels")
        )
        long.append(Batch(ids, labels, None))
    sums = engine.sum_over_ranks(engine.eval_batch(long))
    assert sum(losses) / len(losses) == pytest.approx(float(sums[0] / sums[1]), rel=1e-6)


@pytest.mark.parametrize("kind", cells(["gru", "mamba2"]))
@ranks(2)
def test_evaluations_carry_states_over_held_out_text(kind: str) -> None:
    """The loss is that of each text as one long window; training states are unaffected."""
    packed = stream((0, 5 * SEQ_LEN, 8 * SEQ_LEN + 3)).packed  # the second begins with a window
    with mock.patch("harness.data.batches.LEAST_LENGTH", 6):
        held_out = HeldOutText(packed, 24)
    assert (held_out.at_once, held_out.samples) == (4, 24)
    engine, model, tokens = carrying("zero1", kind), plain_model(kind), torch.tensor(text())
    total, targets = 0.0, 0
    for begin, end in ((0, 5), (5, 6), (6, 12), (12, 18), (18, 24)):
        window = tokens[begin * SEQ_LEN : end * SEQ_LEN + 1]
        with torch.no_grad():
            logits = model(input_ids=window[None, :-1], use_cache=False).logits[0]
        losses = functional.cross_entropy(logits, window[1:], reduction="none")
        # The text of a stream that begins within a document has an unknown past.
        counted = losses[0 if begin in (0, 5) else SEQ_LEN :]
        total, targets = total + float(counted.sum()), targets + len(counted)
    before = [t.clone() for f in engine.fragments() for t in f.tensors.values()]
    assert held_out_loss(engine, held_out) == pytest.approx(total / targets, rel=1e-5)
    assert held_out_loss(engine, held_out) == pytest.approx(total / targets, rel=1e-5)
    after = [t for f in engine.fragments() for t in f.tensors.values()]
    assert all(map(torch.equal, before, after))
    probe = held_out.first(7)
    expected = [(text.input_ids, text.labels) for text in texts_of(probe)]
    assert [ids.shape[1] // SEQ_LEN for ids, _ in expected] == [5, 1]
    with torch.no_grad():
        nats = sum(float(forward(model, ids, labels)[0]) for ids, labels in expected)
    assert loss_of(engine, probe) == pytest.approx(nats / (6 * SEQ_LEN), rel=1e-5)


@ranks(2)
def test_carried_state_advances_on_a_skipped_fp16_step() -> None:
    engine = carrying(fp16())
    windows: list[int] = []
    for step in range(2):
        loss(engine, step)
        assert not engine.step_applied
        carried = [f for f in engine.fragments() if f.name.startswith("carried")]
        tensors = [tensor for fragment in carried for tensor in fragment.tensors.values()]
        assert all(bool(tensor.isfinite().all()) for tensor in tensors)
        windows = [n for t in tensors if t.dtype == torch.int64 for n in t.tolist()]
    assert sorted(itertools.chain(*gathered(windows))) == [1, 4, 7, 10, 13, 16, 19, 22]
