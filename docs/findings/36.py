import deepspeed, torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
groups = [{"params": [layer.weight for layer in model]}, {"params": [layer.bias for layer in model]}]
engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config={
    "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"},
    "optimizer": {"type": "Adam", "params": {"torch_adam": True}}, "bf16": {"enabled": True}})
sums = engine.optimizer.fp32_groups_gradients_flat
flatten = engine.flatten

def fits_bf16():
    return all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in sums)

def packed(tensors):
    print("packs", [tensor.numel() for tensor in tensors], "| sums fit into bf16:", fits_bf16())
    return flatten(tensors)

engine.flatten = packed
for _ in range(2):
    engine.backward(engine(torch.randn(1, 64, dtype=torch.bfloat16)).square().sum())
    print("sums fit into bf16:", fits_bf16())
    engine.step()
