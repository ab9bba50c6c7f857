"""CPU ranks that believe in streams: every operation of a real engine is seen, without a GPU.

Inside `simulated()` DeepSpeed's accelerator hands out the streams and events of streams.py, and
each operation is noted with the storages that it reads and writes on the current stream.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.streams import Device, Event, Stream, Work, frames

COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "broadcast"),
    *("reduce_scatter_tensor", "reduce", "all_to_all_single"),
)
BOUND = {  # what DeepSpeed's backend looked up when it was made
    "all_gather_function": "all_gather_into_tensor",
    "reduce_scatter_function": "reduce_scatter_tensor",
}
WAITS = {  # operations whose result or size the host needs
    *("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero"),
    *("aten::masked_select", "aten::_unique2", "aten::repeat_interleave.Tensor"),
}
READS_SECOND = {
    *("c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::allgather_"),
    *("c10d::reduce_scatter_", "c10d::alltoall_base_"),
}


class _Watched(TorchDispatchMode):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result, name = func(*args, **kwargs), func.name()
        if name in WAITS and not _in_torch_optim():
            self.device.host_waits(self.device.current.clock)
        if not func.is_view and name not in ("aten::detach", "aten::alias", "aten::lift_fresh"):
            returns_early = kwargs.get("non_blocking") or (
                name == "aten::copy_" and args[2:] == (True,)
            )
            accesses = list(_accesses(func, args, kwargs, result))
            self.device.run(name, accesses, waits=not returns_early)
        return result


def _accesses(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Iterator[tuple[torch.Tensor, bool]]:
    """(tensor, whether it is written) of all that an operation takes and returns."""
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if func.name().startswith("c10d::"):  # whose schemas do not tell
            writes = not (index == 1 and func.name() in READS_SECOND)
        yield from ((tensor, writes) for tensor in _tensors(value))
    yield from ((tensor, True) for tensor in _tensors(result))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _in_torch_optim() -> bool:
    """True where torch reads its own step counters, which lie on the host with a GPU, too."""
    return any("/torch/optim/" in file for file, _ in itertools.islice(frames(), 12))


def _collective(device: Device, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        asynchronous = bool(kwargs.get("async_op"))
        device.network.wait_stream(device.current)
        with device.on(device.network):
            work = original(*args, **kwargs)
        if asynchronous and work is not None:
            return Work(work, device)
        device.current.wait_stream(device.network)
        return work

    return call


def _waiting(device: Device, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        device.host_waits(device.current.clock)
        return original(tensor, *args, **kwargs)

    return call


@contextlib.contextmanager
def simulated(synchronizes: bool = True) -> Iterator[Device]:
    """The CPU as a device with streams, on which the engine has to be built, too.

    `synchronizes`: False lets the accelerator's synchronize() do nothing.
    """
    from deepspeed.comm.comm import cdb

    device, accelerator = Device(), type(get_accelerator())
    members = {
        "is_synchronized_device": lambda self: False,
        "resolves_data_dependency": lambda self: False,
        "handles_memory_backpressure": lambda self: False,
        "use_host_timers": lambda self: True,
        "synchronize": lambda self, index=None: device.synchronize() if synchronizes else None,
        "Stream": property(lambda self: partial(Stream, device)),
        "Event": property(lambda self: partial(Event, device)),
        "stream": lambda self, stream: device.on(stream),
        "current_stream": lambda self, index=None: device.current,
        "default_stream": lambda self, index=None: device.default,
        "pin_memory": lambda self, tensor, *args, **kwargs: device.pin(tensor),
    }
    collectives = {name: _collective(device, getattr(dist, name)) for name in COLLECTIVES}
    reads = {name: _waiting(device, getattr(torch.Tensor, name)) for name in ("cpu", "tolist")}
    with (
        mock.patch.multiple(accelerator, **members),
        mock.patch.multiple(dist, **collectives),
        mock.patch.multiple(cdb, **{bound: collectives[name] for bound, name in BOUND.items()}),
        mock.patch.multiple(torch.Tensor, record_stream=lambda *_: None, **reads),
        _Watched(device),
    ):
        yield device
