import deepspeed, torch

def trains(offload, bf16):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": bf16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": offload}},
    })
    applied = []
    for factor in (float("nan"), 1.0, 1.0):
        x = torch.ones(1, 4, dtype=torch.bfloat16 if bf16 else torch.float32)
        engine.backward(engine(x).sum() * factor)
        engine.step()
        applied.append(engine.was_step_applied())
    return applied

for offload, bf16 in (("none", True), ("cpu", False), ("cpu", True)):
    print(f"optimizer on the CPU: {offload}, bf16: {bf16}, applied: {trains(offload, bf16)}")
