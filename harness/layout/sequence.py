"""Sequence parallelism: which numbers of ranks can divide the rows of a model's batches."""

from __future__ import annotations

from collections.abc import Iterator

from harness.layout.shape import Shape


def sequence_problems(
    shape: Shape,
    places: int,
    seq_len: int,
    tensor: int = 1,
    ranks: int | None = None,
    unit: str = "tokens",
) -> list[str]:
    """Return why so many ranks cannot divide rows of `seq_len` tokens, and the numbers that can.

    `shape`: the undivided model's; `tensor`: ranks that divide its heads; `ranks`: that the other
    axes leave, which these numbers must divide, too; None for `places`; `unit`: of `seq_len`.
    """
    ranks = ranks or places
    problems = [*_problems(shape, places, seq_len, tensor)]
    if not problems:
        return []
    most = max(places, shape.num_heads)
    legal = [
        n for n in range(1, most + 1) if not (ranks % n or [*_problems(shape, n, seq_len, tensor)])
    ]
    use = " or ".join(map(str, legal))
    below = seq_len // places * places
    if below and not [*_problems(shape, places, below, tensor)]:  # the tokens alone are wrong
        use += f", or {below} or {below + places} {unit}"
    return [f"{' and '.join(problems)}: use {use}"]


def _problems(shape: Shape, places: int, seq_len: int, tensor: int) -> Iterator[str]:
    if places == 1:
        return
    if not shape.family.divides_rows:
        yield f"nobody has divided the rows of {shape.model_type}"
    if seq_len % places:
        yield f"{seq_len} tokens cannot be divided over {places} ranks"
    heads, kv = shape.num_heads // tensor, max(1, shape.num_kv_heads // tensor)
    each = f" of each of {tensor} tensor ranks" if tensor > 1 else ""
    if heads % places:
        yield f"{heads} attention heads{each} cannot be divided over {places}"
    if kv % places and places % kv:
        yield f"{kv} key heads{each} cannot be divided over {places}, nor be shared"
