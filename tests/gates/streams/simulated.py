"""Simulates streams on CPU ranks: every operation of a real engine is recorded without a GPU.

In `simulated()`, DeepSpeed's accelerator returns the streams and events of device.py, and each
operation is recorded with the storages that it reads and writes on the current stream.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from harness.models import varlen
from tests.gates.streams.device import Event, Memory, Stream, Timeline, Work, is_within
from tests.tables import beside

_tolist = torch.Tensor.tolist  # before the simulator treats it as a wait


def varlen_kernel(memory: Memory) -> varlen.Kernel:
    """Return attention within documents that reads their bounds on the device, as kernels do."""

    def kernel(query: Any, key: Any, value: Any, bounds: Any, _longest: int, **how: Any) -> Any:
        alone = functools.partial(varlen.alone, **how)
        return _Launched.apply(query, key, value, bounds, alone, memory)  # type: ignore[no-untyped-call]

    return kernel


class _Launched(torch.autograd.Function):
    """The CPU's attention document by document, recorded as one operation."""

    @staticmethod
    def forward(context: Any, *inputs: Any) -> torch.Tensor:
        """Return the output (tokens, heads, head_dim) of inputs with the same shape."""
        query, key, value, bounds, alone, memory = inputs
        context.memory = memory
        with _disable_current_modes():
            places = _tolist(bounds)
            output = varlen.InTurn.forward(context, query, key, value, places, alone)
        memory.run([(tensor, False) for tensor in (query, key, value, bounds)], [output])
        return output

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        """Return the gradients of queries, keys and values."""
        saved = context.saved_tensors
        with _disable_current_modes():
            gradients = varlen.gradients_in_turn(saved[:3], context.bounds, context.alone, gradient)
        context.memory.run([(tensor, False) for tensor in (gradient, *saved)], [*gradients])
        return *gradients, None, None, None


COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "broadcast"),
    *("reduce_scatter_tensor", "reduce", "all_to_all_single"),
)
BOUND = {  # functions that DeepSpeed's backend looks up when it is created
    "all_gather_function": "all_gather_into_tensor",
    "reduce_scatter_function": "reduce_scatter_tensor",
}
WAITS = beside(__file__, "waits.toml")["waits"]
COPIES = ("aten::copy_", "aten::_to_copy")
VIEWS = ("aten::detach", "aten::alias", "aten::lift_fresh")  # besides those whose schema says so
READS_SECOND = {
    *("c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::allgather_"),
    *("c10d::reduce_scatter_", "c10d::alltoall_base_"),
}
FROM_NUMBERS = ("FloatTensor", "ByteTensor", "IntTensor", "DoubleTensor", "LongTensor")


class _Name(str):
    """The device's name, as DeepSpeed requests it: any other "cpu" is the host."""


HERE = _Name("cpu")


class Device:
    """A simulated device: its streams and all memory."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.memory = Memory(self.timeline)
        self._thread = threading.current_thread()

    @property
    def is_watched(self) -> bool:
        """True in the thread that launches; other threads, which save, work on host memory."""
        return threading.current_thread() is self._thread

    def pin(self, tensor: torch.Tensor, *_alignment: Any) -> torch.Tensor:
        """Mark this memory as page-locked host memory."""
        self.memory.mark(tensor, "pinned")
        return tensor

    def waits_for(self, kind: str) -> None:
        """Make the host wait for the current stream."""
        self.timeline.host_waits(self.timeline.current.clock, kind)

    def sent(self, tensor: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """Return a device copy of a host tensor."""
        is_pinned = self.memory.is_pinned(tensor)
        with _disable_current_modes():
            copy = tensor.clone()
        self.memory.mark(copy, "device")
        self.memory.run([(copy, True), (tensor, False)], [], is_copy=True)
        if not (non_blocking and is_pinned):
            self.waits_for("copy to the device")
        return copy

    def fetched(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a host copy of a device tensor."""
        with _disable_current_modes():
            copy = tensor.detach().clone()
        self.memory.mark(copy, "pageable")
        self.memory.run([(copy, True), (tensor, False)], [], is_copy=True)
        self.waits_for("copy to the host")
        return copy


class _Watched(TorchDispatchMode):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name, memory = func.name(), self.device.memory
        if func.is_view or name in VIEWS:
            return func(*args, **kwargs)
        touched = list(_accesses(func, args, kwargs))
        result = func(*args, **kwargs)
        is_between = name in COPIES and len({memory.is_host(t) for t, _ in touched}) == 2
        is_pinned = is_between and any(memory.is_pinned(t) for t, _ in touched)
        on_host = memory.run(touched, list(_tensors(result)), is_between)
        if not (on_host or name.startswith("c10d::") or ".memory_format" in name):
            self.device.timeline.count(_moved_bytes(name, touched, [*_tensors(result)]))
        returns_early = kwargs.get("non_blocking") or (
            name == "aten::copy_" and args[2:] == (True,)
        )
        # torch's optimizers read their step counters, which on a GPU are on the host or not read.
        is_counter = name == "aten::_local_scalar_dense" and is_within("/torch/optim/")
        if name in WAITS and not (on_host or is_counter or kwargs.get("output_size") is not None):
            self.device.waits_for(WAITS[name])
        elif is_between and not (returns_early and is_pinned):
            to_host = memory.is_host(touched[0][0])
            self.device.waits_for("copy to the host" if to_host else "copy to the device")
        return result


_OVERWRITES = ("copy_", "zero_", "fill_")  # they do not read what they write


def _moved_bytes(
    name: str, touched: Sequence[tuple[torch.Tensor, bool]], made: Sequence[torch.Tensor]
) -> int:
    """Return the bytes that an operation reads and writes."""
    if name.startswith("aten::_fused_adamw_"):  # its schema says that it writes gradients, too
        touched = [(tensor, False) for tensor, _ in touched]
        made = [tensor for tensor, _ in touched if tensor.numel() > 1]
        return sum(map(_bytes, made)) * 7 // 4
    is_read = not name.partition(".")[0].endswith(_OVERWRITES)
    moved = sum(_bytes(tensor) * (1 + (writes and is_read)) for tensor, writes in touched)
    known = {id(tensor) for tensor, _ in touched}
    return moved + sum(_bytes(tensor) for tensor in made if id(tensor) not in known)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _accesses(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yield (tensor, True if written) for all arguments of an operation."""
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if func.name().startswith("c10d::"):  # their schemas do not say
            writes = not (index == 1 and func.name() in READS_SECOND)
        yield from ((tensor, writes) for tensor in _tensors(value))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _collective(device: Device, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors, timeline = [*_tensors(args), *_tensors([*kwargs.values()])], device.timeline
        if all(device.memory.is_host(tensor) for tensor in tensors):
            return original(*args, **kwargs)  # gloo's own
        timeline.network.wait_stream(timeline.current)
        with timeline.on(timeline.network):
            work = original(*args, **kwargs)
        if kwargs.get("async_op") and work is not None:
            return Work(work, timeline, tensors)
        timeline.current.wait_stream(timeline.network)
        return work

    return call


def _moved(device: Device, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of Tensor.to, which may move a tensor between memories."""

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        target = kwargs.get("device", args[0] if args else None)
        names_device = isinstance(target, str | torch.device) and str(target) != "meta"
        names_device = names_device and not is_within("/torch/nn/utils/")  # it checks devices
        if device.is_watched and names_device and tensor.device.type == "cpu":
            is_host = device.memory.is_host(tensor)
            to_host = type(target) is str  # the devices of the harness and DeepSpeed are objects
            if is_host and not to_host:
                tensor = device.sent(tensor, bool(kwargs.get("non_blocking")))
            elif to_host and not is_host:
                tensor = device.fetched(tensor)
                kwargs.pop("copy", None)
        return original(tensor, *args, **kwargs)

    return to


def _loaded(device: Device) -> Callable[..., torch.Tensor]:
    """Return a replacement of the harness's copy to the device, from page-locked memory."""

    def on_device(tensor: torch.Tensor, _target: torch.device) -> torch.Tensor:
        if not device.memory.is_host(tensor):
            return tensor
        return device.sent(device.pin(tensor), non_blocking=True)

    return on_device


def _fetched(device: Device, original: Callable[..., Any], returns: bool) -> Callable[..., Any]:
    """Return a replacement of Tensor.cpu (if it `returns`) or of a reader of all values."""

    def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not device.is_watched or device.memory.is_host(tensor):
            return original(tensor, *args, **kwargs)
        if returns:
            return device.fetched(tensor)
        device.waits_for("values")
        return original(tensor, *args, **kwargs)

    return read


def _sent(device: Device, original: Callable[..., Any], always: bool) -> Callable[..., Any]:
    """Return a replacement of a creator of numbers, on the device `always` or if named."""

    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor: torch.Tensor = original(*args, **kwargs)
        target = kwargs.get("device")
        is_there = always or (target is not None and type(target) is not str)
        is_there = is_there and device.is_watched and tensor.device.type == "cpu"
        return device.sent(tensor) if is_there else tensor

    return make


@contextlib.contextmanager
def simulated() -> Iterator[Device]:
    """Yield the CPU as a device with streams; the engine must also be built in the body."""
    from deepspeed.comm.comm import cdb

    from harness.data.batch import on_device
    from harness.models import varlen

    device, accelerator = Device(), type(get_accelerator())
    timeline, memory = device.timeline, device.memory
    members: dict[str, Any] = {
        "is_synchronized_device": lambda self: False,
        "resolves_data_dependency": lambda self: False,
        "handles_memory_backpressure": lambda self: False,
        "use_host_timers": lambda self: True,
        "synchronize": lambda self, index=None: timeline.synchronize(),
        "Stream": property(lambda self: partial(Stream, timeline)),
        "Event": property(lambda self: partial(Event, timeline)),
        "stream": lambda self, stream: timeline.on(stream),
        "current_stream": lambda self, index=None: timeline.current,
        "default_stream": lambda self, index=None: timeline.default,
        "pin_memory": lambda self, tensor, *args, **kwargs: device.pin(tensor),
        "is_pinned": lambda self, tensor: memory.is_pinned(tensor),
        "device_name": lambda self, index=None: HERE,
        "current_device_name": lambda self: HERE,
    }
    for name in FROM_NUMBERS:
        make = _sent(device, getattr(torch, name), always=True)
        members[name] = property(lambda self, make=make: make)
    of_tensors = {
        "record_stream": lambda tensor, stream: memory.record(tensor, stream),
        "to": _moved(device, torch.Tensor.to),
        "cpu": _fetched(device, torch.Tensor.cpu, returns=True),
        "tolist": _fetched(device, torch.Tensor.tolist, returns=False),
        "numpy": _fetched(device, torch.Tensor.numpy, returns=False),
    }
    collectives = {name: _collective(device, getattr(dist, name)) for name in COLLECTIVES}
    bound = {function: collectives[name] for function, name in BOUND.items()}
    with (
        mock.patch.multiple(accelerator, **members),
        mock.patch.multiple(dist, **collectives),
        mock.patch.multiple(cdb, **bound) if cdb else contextlib.nullcontext(),
        mock.patch.multiple(torch.Tensor, **of_tensors),
        mock.patch.object(torch, "tensor", _sent(device, torch.tensor, always=False)),
        contextlib.ExitStack() as loads,
        mock.patch.object(varlen, "_in_turn", varlen_kernel(memory)),
        _Watched(device),
    ):
        for room in [m for m in sys.modules.values() if vars(m).get("on_device") is on_device]:
            loads.enter_context(mock.patch.object(room, "on_device", _loaded(device)))
        yield device
