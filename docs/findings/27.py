import deepspeed, torch

def step(stage):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": stage},
    })
    engine.backward(engine(torch.ones(1, 4)).sum() * float("nan"))
    engine.step()
    finite = bool(engine.module.weight.isfinite().all())
    return f"applied {engine.was_step_applied()}, the weights are finite: {finite}"

for stage in (0, 1):
    print(f"stage {stage}: {step(stage)}")
