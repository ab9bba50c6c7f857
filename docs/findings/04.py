import deepspeed, torch

def norm(**section):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, bias=False)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        **section,
    })
    engine.backward(engine(torch.ones(1, 4)).float().sum())
    engine.step()
    return float(engine.get_global_grad_norm())

print("fp32              ", norm())  # 16 elements of 1: 4
print("bfloat16          ", norm(torch_autocast={"enabled": True, "dtype": "bfloat16"}))
print("float16           ", norm(torch_autocast={"enabled": True, "dtype": "float16"}))
print("fp32, same process", norm())
