import deepspeed, torch

def optimizer(**params):
    model = torch.nn.Linear(4, 4)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {
            "weight_decay": 0.1, "torch_adam": True, **params}},
    })
    return type(engine.basic_optimizer).__name__

print('"Adam" is', optimizer())  # decays the weights, not the gradient
print('"Adam" with adam_w_mode false is', optimizer(adam_w_mode=False))
