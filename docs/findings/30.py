import deepspeed, torch

def weights(stage):
    model = torch.nn.Linear(2, 2)
    groups = [
        {"params": [model.weight], "weight_decay": 0.5},
        {"params": [model.bias], "weight_decay": 0.0},
    ]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config={
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adagrad", "params": {"lr": 0.1}},
    })
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()

for stage in (0, 1, 3):
    try:
        print(f"stage {stage}: {weights(stage) or 'stepped'}")
    except IndexError as error:
        print(f"stage {stage}: IndexError: {error}")
