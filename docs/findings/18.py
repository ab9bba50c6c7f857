import deepspeed, torch

def norm(copied):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 8))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": [
            {"patterns": ["1.weight"], "partition_type": "column"}]}},
    })
    transposed = model[0](torch.ones(6, 6)).t()
    out = model[1](transposed.contiguous() if copied else transposed)
    engine.backward(out.sum())
    engine.step()
    return float(engine.get_global_grad_norm())

print(f"copied: norm {norm(True):.3f}, as it is: norm {norm(False):.3f}")
