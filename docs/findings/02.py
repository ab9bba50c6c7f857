import deepspeed, torch

def first_step(stage):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, bias=False)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {
            "lr": 1e-3, "weight_decay": 0.0, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
    })
    parts = ("fp32_groups", "single_partition_of_fp32_groups")
    master = getattr(engine.optimizer, parts[min(stage, 1)])[0]
    master = master[0] if isinstance(master, list) else master
    before = master.detach().clone()
    engine.backward(engine(torch.ones(1, 4).bfloat16()).float().sum())
    engine.step()
    return (master - before).abs().max().item()

print("stage 1: the first step of AdamW is", first_step(1))  # lr, by definition
print("stage 0: the first step of AdamW is", first_step(0))
