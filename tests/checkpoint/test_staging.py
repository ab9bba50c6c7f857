"""Files from and to an accelerator, which memory of the host stands for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from harness.checkpoint import tensor_file
from harness.checkpoint.tensor_file import STAGING, Staging, TensorReader
from tests.checkpoint.small import fragments, save

PART_BYTES = 64


class Bus:
    """Notes buffers, and which half is waited for before it is filled again."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.log: list[str] = []
        self.staging = Staging(lambda tensor: True, self.new, self.sent, PART_BYTES)

    def new(self, count: int) -> torch.Tensor:
        self.sizes.append(count)
        return torch.full((count,), 255, dtype=torch.uint8)

    def sent(self, device: torch.device) -> Callable[[], object]:
        number = sum(entry.startswith("sent") for entry in self.log)
        self.log.append(f"sent {number}")
        return lambda: self.log.append(f"waited for {number}")


@pytest.fixture
def bus(monkeypatch: pytest.MonkeyPatch) -> Bus:
    bus = Bus()
    monkeypatch.setattr(tensor_file, "STAGING", bus.staging)
    monkeypatch.setattr(tensor_file, "STAGING", bus.staging)
    return bus


def test_a_save_from_an_accelerator_has_the_bytes_of_one_from_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = save(tmp_path / "host", 1)
    bus = Bus()
    monkeypatch.setattr(tensor_file, "STAGING", bus.staging)
    saved = save(tmp_path / "accelerator", 1)
    save(tmp_path / "again", 1)
    assert max(tensor.nbytes for f in fragments(1) for tensor in f.tensors.values()) > PART_BYTES
    for path in expected.path.iterdir():
        assert (saved.path / path.name).read_bytes() == path.read_bytes(), path.name
    assert bus.sizes == [2 * PART_BYTES]  # one buffer, kept


def test_a_half_is_filled_while_the_other_is_hashed() -> None:
    bus, log = Bus(), []
    parts = bus.staging.on_host(torch.arange(40, dtype=torch.int64))  # five parts
    for number, part in enumerate(parts):
        log.append(f"filled {number}")
        assert part.view(torch.int64).tolist() == [*range(8 * number, 8 * number + 8)]
        bus.staging.used_until(lambda number=number: log.append(f"hashed {number}"))
    assert log == [
        *("filled 0", "filled 1"),
        *("hashed 0", "filled 2", "hashed 1", "filled 3", "hashed 2", "filled 4"),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_is_read_while_what_was_read_is_sent(
    tmp_path: Path, bus: Bus, dtype: torch.dtype
) -> None:
    values = torch.arange(70, dtype=torch.float32)
    path = tmp_path / "values.safetensors"
    writer = tensor_file.TensorWriter(path, {"x": values})
    writer.write("x", 0, values)
    writer.close()
    out = torch.zeros(66, dtype=dtype)
    TensorReader(path).read("x", 3, out)  # of 16 elements each: five parts
    assert torch.equal(out, values[3:69].to(dtype))
    assert bus.sizes == [2 * PART_BYTES]
    assert bus.log == [
        *("sent 0", "sent 1"),
        *("waited for 0", "sent 2", "waited for 1", "sent 3", "waited for 2", "sent 4"),
    ]


def test_what_is_on_the_host_takes_no_buffer(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (path,) = tmp_path.rglob("rank-*.safetensors")
    reader = TensorReader(path)
    name = next(iter(reader._stored))
    reader.read(name, 0, torch.empty(reader.shape(name), dtype=torch.float64).view(-1))
    assert STAGING._halves == []
