"""Show how far back in time a model's gradients reach.

    python tools/gradient_reach.py runs/NAME --text held_out.txt
    python tools/gradient_reach.py runs/lstm runs/gru --text held_out.txt --plot reach.svg

The loss of one token sends gradients to every token before it. If their norms vanish with the
distance, the model cannot learn to use tokens that far back; if they grow, steps must be clipped
(arXiv 1211.5063). Each number is the norm of the gradient with respect to the embedding of the
token at that distance: a median over windows of --tokens tokens.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.errors import ConfigError
from harness.files.paths import option_path
from harness.terminal import command_parser, say
from tools.exported import export_of, opened
from tools.figure import new_figure, plot_problems, write_plot
from tools.workers import INTERRUPTED

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

_AGAINST_ZERO = 1e-30
"""Norm that stands for zero on the logarithmic axis."""


def main(argv: list[str]) -> int:
    """Run the command: argv -> a table on standard output, optional plot -> exit code."""
    arguments = _parser().parse_args(argv)
    try:
        if problems := [*plot_problems(arguments.plot)]:
            raise ConfigError(problems)
        reaches = {str(run): _reach(run, arguments) for run in arguments.runs}
    except ConfigError as error:
        say(f"cannot measure: {error}", sys.stderr)
        return int(error.code)
    except KeyboardInterrupt:
        return INTERRUPTED
    say(_table(reaches))
    if arguments.plot:
        write_plot(arguments.plot, drawn(reaches))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser, add = command_parser(__doc__)
    add("runs", nargs="+", type=option_path, help="Run folders or exported models.")
    add("--text", type=option_path, required=True, help="Text file in UTF-8.")
    add("--tokens", type=int, default=512, help="Tokens per window (default: 512).")
    add("--windows", type=int, default=16, help="Number of windows (default: 16).")
    add("--plot", type=option_path, metavar="FILE", help="Draw the result as .svg or .png.")
    add("--trust-remote-code", action="store_true", help="Run code that comes with the model.")
    return parser


def _reach(run: Path, arguments: argparse.Namespace) -> list[float]:
    """Return the median norm of the gradient at each distance, from 1 on. Raises ConfigError."""
    folder, _ = export_of(run)
    windows = _windows(folder, arguments)
    model = opened(folder, arguments.trust_remote_code).float()
    positions = getattr(model.config, "max_position_embeddings", None) or arguments.tokens
    if arguments.tokens > positions:
        raise ConfigError(f"--tokens is {arguments.tokens}, but {run} has {positions} positions")
    norms = [gradient_norms(model, ids.to(model.device)) for ids in windows]
    return [median(each) for each in zip(*norms, strict=True)]


def _windows(folder: Path, arguments: argparse.Namespace) -> list[torch.Tensor]:
    """Return ids (tokens + 1) of windows spread evenly over the text."""
    import torch

    from harness.data.tokenizer import load_tokenizer

    length, count = arguments.tokens + 1, arguments.windows
    if min(length - 1, count) < 1:
        raise ConfigError("--tokens and --windows must be at least 1")
    try:
        text = arguments.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {arguments.text} cannot be read: {error}") from None
    remote = arguments.trust_remote_code
    tokenizer = load_tokenizer(folder, trust_remote_code=remote)
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    room = len(ids) - length
    if room < count - 1:
        raise ConfigError(
            f"--text {arguments.text} has {len(ids):,} tokens, too few for {count} windows of "
            f"{length - 1}: shorten --tokens"
        )
    return [ids[n * room // max(1, count - 1) :][:length] for n in range(count)]


def gradient_norms(model: Any, ids: torch.Tensor) -> list[float]:
    """Return the norms of a loss's gradient with respect to the embeddings, by distance from 1 on.

    `ids` is (tokens + 1). The loss is that of the last token, in nats; distance 1 is the token
    before.
    """
    import torch

    embedded: list[torch.Tensor] = []

    def keep(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    hook = model.get_input_embeddings().register_forward_hook(keep)
    try:
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0, -1]
    finally:
        hook.remove()
    loss = torch.nn.functional.cross_entropy(logits, ids[-1])
    (gradient,) = torch.autograd.grad(loss, embedded[0])
    norms: list[float] = gradient[0].norm(dim=-1).flip(0).tolist()
    return norms


def _table(reaches: dict[str, list[float]]) -> str:
    tokens = len(next(iter(reaches.values())))
    distances = sorted({*(1 << n for n in range(tokens.bit_length())), tokens})
    width = max(12, *map(len, reaches))
    lines = ["tokens back  " + "  ".join(f"{name:>{width}}" for name in reaches)]
    for distance in distances:
        norms = (f"{norms[distance - 1]:>{width}.2e}" for norms in reaches.values())
        lines.append(f"{distance:>11,}  " + "  ".join(norms))
    return "\n".join(lines)


def drawn(reaches: dict[str, list[float]]) -> Figure:
    """Return a figure with a line per model; both axes are logarithmic."""
    figure = new_figure(7, 3.6, "How far back gradients reach", "loss of one token, median norm")
    axis = figure.subplots()
    for name, norms in reaches.items():
        axis.plot(
            range(1, len(norms) + 1), [max(norm, _AGAINST_ZERO) for norm in norms], label=name
        )
    axis.set(xscale="log", yscale="log", xlabel="tokens back, from 1: the last one that is read")
    axis.legend()
    return figure


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
