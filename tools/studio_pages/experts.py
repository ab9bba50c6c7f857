"""Mixture of experts: a small mixture that is really trained, with its routing and its load."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn
from torch.nn import functional

from harness.layout.shape import active_parameters, num_parameters
from harness.report.chart import Heat, line, lines
from harness.run.meter import expert_load
from tools.studio_app import small
from tools.studio_app.figures import Bars, Drawing, Figure, numbers
from tools.studio_app.page import Choice, Page, Slider, Typed, Values
from tools.studio_app.plans import shape_of
from tools.studio_app.svg import WIDTH, Box, lanes, series

_EXPERTS, _HIDDEN, _CONTEXT = 8, 32, 4
_STEPS, _EVERY, _BATCH = 200, 20, 256
_LR = 5e-3
_TOPS, _BALANCES = (2, 1, 4), (0.1, 0.0, 0.01)  # the default first: they are trained in this order
_ROW, _LABEL, _COLUMNS = 22.0, 80.0, 32
_PRESETS = ("mixtral-8x7b", "qwen3-30b-a3b")
_TEXT = "Mixtures route 2 of 8 experts. The Python Language, version 3."
_KINDS = {
    "small letters": str.islower,
    "capitals": str.isupper,
    "digits": str.isdigit,
    "spaces": str.isspace,
}


@dataclass(frozen=True)
class Snapshot:
    """The mixture after some steps of training."""

    step: int
    loss: float
    """Nats per byte, of the training batch."""
    weights: dict[str, torch.Tensor]


class Mixture(nn.Module):
    """Predicts the next byte of text from the last four; its MLP is a mixture of experts.

    Each byte goes to the `top` experts of its router, whose outputs are weighted by the softmax
    over those (Mixtral, arXiv 2401.04088, section 2.1).
    """

    def __init__(self, top: int) -> None:
        super().__init__()
        self.top = top
        self.embedding = nn.Embedding(256, _HIDDEN)
        self.mix = nn.Linear(_CONTEXT * _HIDDEN, _HIDDEN)
        self.router = nn.Linear(_HIDDEN, _EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(_EXPERTS, _HIDDEN, 2 * _HIDDEN) * _HIDDEN**-0.5)
        self.down = nn.Parameter(torch.randn(_EXPERTS, 2 * _HIDDEN, _HIDDEN) * _HIDDEN**-0.5)
        self.head = nn.Linear(_HIDDEN, 256)

    def forward(self, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(tokens, 4) bytes -> logits (tokens, 256), router logits and the chosen experts."""
        x = torch.tanh(self.mix(self.embedding(context).flatten(1)))
        scores = self.router(x)  # (tokens, experts)
        best, chosen = scores.topk(self.top)
        share = torch.zeros_like(scores).scatter(1, chosen, best.softmax(-1))
        hidden = functional.silu(torch.einsum("td,edf->tef", x, self.up))
        out = torch.einsum("tef,efd->ted", hidden, self.down)
        return self.head(x + torch.einsum("te,ted->td", share, out)), scores, chosen


def figures(values: Values) -> list[Figure]:
    """Return the routing of typed text, the load of the experts, and the arithmetic saved."""
    top, text = values["top"], values["text"] or " "
    snapshots = trained(top, values["balance"])
    now = snapshots[values["step"] // _EVERY]
    chosen, shares = routed(now, top, text)
    load = _load(chosen)
    shape = shape_of(values["model"])
    whole, active = num_parameters(shape), active_parameters(shape)
    names = [f"expert {place}" for place in range(_EXPERTS)]
    kinds, shares_by_kind = _by_kind(text, chosen)
    losses = [(snapshot.step, snapshot.loss) for snapshot in snapshots]
    loads = [(each.step, _load(routed(each, top, text)[0])["max"]) for each in snapshots]
    verdict = "good" if load["max"] < 2 else "warning"
    of_all = f"{active / 1e9:,.1f} of {whole / 1e9:,.1f} billion"
    return [
        numbers(
            ("Loss", f"{now.loss:.3f}", f"nats per byte after {now.step} steps"),
            ("Busiest expert", f"{load['max']:.2f} x", "the mean of all", verdict),
            ("Evenness", f"{load['entropy']:.3f}", "entropy; 1: all alike"),
            ("Arithmetic here", f"{top / _EXPERTS:.0%}", f"{top} of {_EXPERTS} experts"),
            (values["model"], of_all, f"weights multiply a token: {1 - active / whole:.0%} saved"),
        ),
        Drawing("Each byte of the text, and its experts", _picture(text, chosen, shares)),
        Bars(
            "Bytes sent to each expert",
            "bytes",
            names,
            {"bytes": torch.bincount(chosen.flatten(), minlength=_EXPERTS).tolist()},
            height=260,
        ),
        Heat(
            "Share of each kind of byte that goes to an expert",
            "%, by expert",
            [str(n) for n in range(_EXPERTS)],
            kinds,
            shares_by_kind,
            digits=0,
            most=max(max(row) for row in shares_by_kind) or 1,
        ),
        lines(
            "Training: loss, and the busiest expert's load over the mean",
            [line("loss, nats per byte", losses), line("busiest expert", loads)],
            "step",
            from_zero=True,
            height=280,
        ),
    ]


@lru_cache(maxsize=32)
def trained(top: int, balance: float) -> tuple[Snapshot, ...]:
    """Train the mixture on Python's own documentation; return its snapshots at every 20th step.

    The loss is cross-entropy and `balance` x Switch's balancing loss, experts x sum of (share of
    tokens x mean probability) (arXiv 2101.03961, equation 4).
    """
    torch.manual_seed(0)
    model = Mixture(top)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR)
    windows = small.windows(_CONTEXT + 1)
    draws = torch.Generator().manual_seed(1)
    snapshots: list[Snapshot] = []
    for step in range(_STEPS + 1):
        batch = windows[torch.randint(len(windows), (_BATCH,), generator=draws)]
        logits, scores, chosen = model(batch[:, :-1])
        loss = functional.cross_entropy(logits, batch[:, -1])
        if step % _EVERY == 0:
            weights = {name: value.clone() for name, value in model.state_dict().items()}
            snapshots.append(Snapshot(step, float(loss.detach()), weights))
        share = functional.one_hot(chosen, _EXPERTS).float().mean((0, 1))
        balancing = _EXPERTS * (share * scores.softmax(-1).mean(0)).sum()
        optimizer.zero_grad()
        (loss + balance * balancing).backward()
        optimizer.step()
    return tuple(snapshots)


@torch.no_grad()
def routed(snapshot: Snapshot, top: int, text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts (bytes, top) that each byte of a text goes to, and their shares."""
    model = Mixture(top)
    model.load_state_dict(snapshot.weights)
    ids = list(b"\n" * (_CONTEXT - 1) + text.encode())
    contexts = torch.tensor([ids[n : n + _CONTEXT] for n in range(len(ids) - _CONTEXT + 1)])
    _, scores, chosen = model(contexts)
    return chosen, scores.gather(1, chosen).softmax(-1)


def _load(chosen: torch.Tensor) -> dict[str, float]:
    """Return the load of the busiest expert relative to the mean, and the entropy of all."""
    counts = torch.bincount(chosen.flatten(), minlength=_EXPERTS)[None]
    load = expert_load(counts)
    return {name.removeprefix("expert_load_"): float(value) for name, value in load.items()}


def _by_kind(text: str, chosen: torch.Tensor) -> tuple[list[str], list[list[float]]]:
    """Return kinds of bytes and, for each, the percentages of its bytes by expert."""
    letters = [chr(byte) for byte in text.encode()]
    rows, names = [], []
    for name, belongs in _KINDS.items():
        places = [place for place, letter in enumerate(letters) if belongs(letter)]
        if places:
            counts = torch.bincount(chosen[places].flatten(), minlength=_EXPERTS)
            rows.append([round(100 * n / int(counts.sum())) for n in counts.tolist()])
            names.append(name)
    return names or ["none"], rows or [[0.0] * _EXPERTS]


def _picture(text: str, chosen: torch.Tensor, shares: torch.Tensor) -> str:
    """Return a picture with a column for each of the first bytes and a row for each expert, in two
    halves.
    """
    letters = [chr(byte) if 32 < byte < 127 else "·" for byte in text.encode()][: 2 * _COLUMNS]
    count = len(letters)
    halves = [range(at, min(at + _COLUMNS, count)) for at in range(0, count, _COLUMNS)]
    each, names = 1 / _COLUMNS, [f"expert {place}" for place in range(_EXPERTS)]
    pictures = []
    for places in halves:
        boxes = [
            Box(
                *(expert, (place - places[0]) * each, (place - places[0] + 1) * each),
                *(series(expert), "", f"{letters[place]}: {share:.0%} by expert {expert}"),
                opacity=0.25 + 0.75 * share,
            )
            for place in places
            for expert, share in zip(chosen[place].tolist(), shares[place].tolist(), strict=True)
        ]
        label = "The experts of each byte"
        picture = lanes(label, names, boxes, row=_ROW, left=_LABEL, back="page", top=28)
        for number, place in enumerate(places):
            x = _LABEL + (number + 0.5) * each * (WIDTH - _LABEL)
            picture.text(x, 14, letters[place], anchor="middle", room=each * (WIDTH - _LABEL))
        pictures.append(str(picture))
    return "".join(pictures)


PAGE = Page(
    "experts",
    (
        Slider("top", "Experts of a byte", sorted(_TOPS), 2),
        Slider("balance", "Weight of the balancing loss", sorted(_BALANCES), 0.1),
        Slider("step", "After", tuple(range(0, _STEPS + 1, _EVERY)), _STEPS, "steps", plays=True),
        Choice("model", "Compare the arithmetic of", _PRESETS, "mixtral-8x7b"),
        Typed("text", "Text", _TEXT, 400),
    ),
    figures,
    slow_at_first=[
        {"top": str(top), "balance": str(balance)} for top in _TOPS for balance in _BALANCES
    ],
)
