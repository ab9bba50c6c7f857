import deepspeed, torch
from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler

def forward_flops(stage):
    model = torch.nn.Sequential(torch.nn.Linear(3, 5, bias=False))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_allow_untested_optimizer": True})
    profiler = FlopsProfiler(engine.module)
    profiler.start_profile()
    engine(torch.ones(2, 3))
    found = profiler.get_total_flops()
    profiler.end_profile()
    return found

print("by hand", 2 * 2 * 3 * 5)
for stage in (1, 3, 1):
    print(f"stage {stage}: {forward_flops(stage)}")
