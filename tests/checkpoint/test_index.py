"""The index of a checkpoint: parts of parameters stay separate, and older indices are readable."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from harness.checkpoint.index import INDEX, Index, merged, to_index
from harness.checkpoint.manifest import MANIFEST, read_manifest
from harness.checkpoint.reader import Reader
from harness.checkpoint.save import Saver
from harness.checkpoint.store import Retention, Store, verified
from harness.checkpoint.tensor_file import Fragment, write_fragments
from harness.errors import RunStopped, Unusable
from harness.layout.box import Part, share_of, share_of_fused
from tests.checkpoint.small import manifest, put, save_of_ranks
from tests.layout.test_box import cut
from tests.tables import beside

DAMAGED = beside(__file__, "damaged.toml")["rows"]["slices"]
SHAPE = (12, 10)


def weights(shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return torch.arange(float(Part.of(shape).numel)).view(shape)


def own_values(part: Part) -> torch.Tensor:
    return cut(weights(), part).reshape(-1)


def by_rows(ranks: int) -> list[Part]:
    return [Part.of(SHAPE).cut(0, share_of(12, rank, ranks)) for rank in range(ranks)]


def by_columns(ranks: int) -> list[Part]:
    return [Part.of(SHAPE).cut(1, share_of(10, rank, ranks)) for rank in range(ranks)]


def fused(ranks: int) -> list[Part]:
    return [Part.of(SHAPE).cut(0, share_of_fused((6, 3, 3), rank, ranks)) for rank in range(ranks)]


def both(ranks: int) -> list[Part]:
    return [p.cut(1, share_of(10, n, 2)) for p in by_rows(ranks) for n in range(2)]


CUTS = {"whole": [Part.of(SHAPE)], "rows": by_rows(2), "uneven rows": by_rows(5)}
CUTS |= {"columns": by_columns(2), "uneven columns": by_columns(3), "fused": fused(3)}
CUTS |= {"both": both(2)}


def written(folder: Path, parts: list[Part], shards: int = 2) -> dict[str, Any]:
    """Return the index of ranks that hold these parts, each in ZeRO shards."""
    indices, rank = [], 0
    for part in parts:
        tensors = {"weight": own_values(part), "exp_avg": 2 * own_values(part)}
        for shard in range(shards):
            own = Fragment("w", part, 0, tensors).share(shard, shards)
            _, entries = write_fragments(folder, rank, [own] if own else [])
            indices.append(to_index(entries))
            rank += 1
    return json.loads(json.dumps(merged(indices)))  # as read from a file


@pytest.mark.parametrize("after", CUTS)
@pytest.mark.parametrize("before", CUTS)
def test_sharded_parameter_is_read_as_any_other_sharding(tmp_path, before: str, after: str) -> None:
    reader = Reader(tmp_path, Index(written(tmp_path, CUTS[before])))
    draw = random.Random(0)
    for part in CUTS[after]:
        own = 2 * own_values(part)
        for _ in range(5):
            start, stop = sorted(draw.choices(range(part.numel + 1), k=2))
            around = torch.full((stop - start + 2,), -1.0)
            reader.fill("w", "exp_avg", start, around[1:-1], part)
            assert torch.equal(around[1:-1], own[start:stop])
            assert around[0] == around[-1] == -1
    assert torch.equal(reader.whole("w", "weight"), weights())


def test_sharded_parameter_is_read_in_another_dtype(tmp_path: Path) -> None:
    reader = Reader(tmp_path, Index(written(tmp_path, by_columns(2))))
    half = torch.empty(120, dtype=torch.bfloat16)
    reader.fill("w", "weight", 0, half)
    assert torch.equal(half, weights().view(-1).bfloat16())


def test_an_index_without_cuts_is_as_it_was(tmp_path: Path) -> None:
    pieces = [[0, 60, "rank-00000-000.safetensors"], [60, 60, "rank-00001-000.safetensors"]]
    about = {"shape": [12, 10], "kinds": ["weight", "exp_avg"], "at": pieces}
    assert written(tmp_path, CUTS["whole"]) == {"w": about}


def test_a_cut_is_written_once_for_all_its_pieces(tmp_path: Path) -> None:
    index = written(tmp_path, by_columns(2))
    assert index["w"]["parts"] == [[[[0, 12]], [[0, 5]]], [[[0, 12]], [[5, 10]]]]
    assert [piece[0::3] for piece in index["w"]["at"]] == [[0, 0], [30, 0], [0, 1], [30, 1]]


def of_one_rank(rank: int, part: Part, kind: str = "weight") -> dict[str, Any]:
    pieces = [(0, 8, f"rank-{rank:05d}-000.safetensors")]
    return {"w": {"shape": part.whole, "kinds": (kind,), "at": pieces}}


def test_two_ranks_that_save_the_same_elements_are_refused() -> None:
    """As if a parallel axis had cut a parameter without declaring it."""
    part = Part.of((2, 4))
    with pytest.raises(Unusable, match=r"rank-00000.* and rank-00001.* both hold w from 0"):
        merged([of_one_rank(0, part), of_one_rank(1, part)])


def test_a_shape_that_ranks_disagree_on_is_refused() -> None:
    with pytest.raises(Unusable, match=r"w has shape .2, 4. on one rank, .4, 2. on another"):
        merged([of_one_rank(0, Part.of((2, 4))), of_one_rank(1, Part.of((4, 2)))])


def test_a_buffer_that_several_ranks_have_is_there_once() -> None:
    part = Part.of((2, 4))
    index = merged([of_one_rank(0, part, "buffer"), of_one_rank(1, part, "buffer")])
    assert index["w"]["at"] == [(0, 8, "rank-00000-000.safetensors")]


def test_index_with_missing_elements_is_not_published(tmp_path: Path) -> None:
    """What is missing is noticed before the checkpoint gets its name, not when it is needed."""
    half = Fragment("w", Part.of(SHAPE).cut(0, ((0, 6),)), 0, {"weight": torch.zeros(60)})
    saver = Saver(Store(tmp_path), 0, Retention())
    saver.start(manifest(2), [half], {}, background=False)
    with pytest.raises(RunStopped, match="saved 60 elements of w, which has 120"):
        saver.finish()
    assert Store(tmp_path).all() == []


@pytest.mark.parametrize(("key", "value", "problem"), DAMAGED)
def test_a_damaged_part_is_refused(tmp_path: Path, key: str, value: object, problem: str) -> None:
    index = written(tmp_path, by_columns(2))
    put(index["w"], key, value)
    with pytest.raises(Unusable, match=problem):
        Index(index).check()


def save_divided(folder: Path) -> Path:
    """Write a checkpoint of two ranks, each with half of the columns."""
    parts = [Fragment("w", part, 0, {"weight": own_values(part)}) for part in by_columns(2)]
    return save_of_ranks(folder, 2, parts)


def test_a_checkpoint_with_parts_is_read_to_the_last_bit(tmp_path: Path) -> None:
    checkpoint = verified(save_divided(tmp_path))
    assert torch.equal(Reader.of(checkpoint).whole("w", "weight"), weights())


# Written by two ranks of ZeRO 1.
FORMAT_1 = Path(__file__).parent / "format_1" / "step-00000002"


def test_a_checkpoint_of_format_1_is_read_to_the_last_bit() -> None:
    assert json.loads((FORMAT_1 / MANIFEST).read_bytes())["format"] == 1
    checkpoint = verified(FORMAT_1)
    reader = Reader.of(checkpoint)
    index = json.loads((FORMAT_1 / INDEX).read_bytes())
    assert sorted(reader.index) == sorted(index)
    stored = {path.name: load_file(path) for path in FORMAT_1.glob("rank-*")}
    for name, about in index.items():
        for kind in about["kinds"]:
            pieces = [stored[file][f"{name}@{offset}/{kind}"] for offset, _, file in about["at"]]
            expected = torch.cat(pieces).view(about["shape"])
            assert torch.equal(reader.whole(name, kind), expected), (name, kind)


def test_format_1_is_written_byte_for_byte() -> None:
    assert read_manifest(FORMAT_1).to_bytes() == (FORMAT_1 / MANIFEST).read_bytes()
    content = json.loads((FORMAT_1 / INDEX).read_bytes())
    index = Index(content)
    entries = [entry for name in index for entry in index.entries(name)]
    assert json.dumps(to_index(entries)) == json.dumps(content)
