import deepspeed, torch
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as C

released, name = [], "_PartitionedParameterCoordinator__release_param"
release = getattr(C, name)
setattr(C, name, lambda self, *given: (released.append(given), release(self, *given)))

def releases(evaluate):
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    })
    if evaluate:
        with torch.no_grad():
            engine(torch.ones(1, 8))
    for _ in range(5):
        released.clear()
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
    return len(released)

for first in (False, True):
    print(f"evaluates first: {first}, releases in the fifth step: {releases(first)}")
