import deepspeed, torch

model = torch.nn.Sequential(*(torch.nn.Linear(2, 2, bias=False) for _ in range(3)))
frozen = model[1].weight.requires_grad_(False)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
    "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2,
                          "stage3_param_persistence_threshold": 0}})

def step():
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()

step()
print("second copies:", [layer.weight.ds_secondary_tensor is not None for layer in model])
frozen.ds_tensor.fill_(7.0)  # as a checkpoint would that is read now
model[1].register_forward_hook(lambda m, i, o: print("used:", m.weight.eq(7.0).all().item()))
engine(torch.ones(1, 2))
