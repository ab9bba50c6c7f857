import deepspeed, torch

model = torch.nn.Linear(4, 4, bias=False)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 0},
})
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
print("gradient norm:", engine.get_global_grad_norm())
