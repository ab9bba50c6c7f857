import deepspeed, torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

def largest(stage):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, bias=False)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    })
    safe_set_full_fp32_param(model.weight, torch.full((4, 4), 7.0))
    got = safe_get_full_fp32_param(model.weight)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()  # of rate 0
    return f"{model.weight.max().item():.4f}, read as {None if got is None else got.max().item()}"

print("stage 1: set to 7, it is", largest(1))
print("stage 0: set to 7, it is", largest(0))
