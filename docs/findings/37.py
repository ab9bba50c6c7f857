import contextlib, deepspeed, torch
from deepspeed.accelerator import get_accelerator

class Stream:  # tells whom it waits for
    names = iter(["main", "gathers", "reduces"])
    def __init__(self, **_): self.name = next(self.names)
    def wait_stream(self, other): print(self.name, "waits for", other.name)
    def __getattr__(self, _): return lambda *_: print("the host waits for", self.name)

Event = type("Event", (), {"__getattr__": lambda *_: lambda *_: False})
main, cpu = Stream(), type(get_accelerator())
cpu.is_synchronized_device, cpu.use_host_timers = lambda self: False, lambda self: True
cpu.Stream, cpu.Event, cpu.stream = Stream, Event, lambda self, s: contextlib.nullcontext()
cpu.current_stream = cpu.default_stream = lambda self: main
cpu.synchronize = lambda self: print("the host waits for all")
torch.Tensor.record_stream = lambda *_: None
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(2, 2, bias=False), config={
    "train_micro_batch_size_per_gpu": 1, "timers": {"throughput": {"enabled": False}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "Adam", "params": {"torch_adam": True}}})
engine.backward(engine(torch.ones(1, 2)).sum())
print("step")
engine.step()
print("next forward pass")
engine(torch.ones(1, 2))
