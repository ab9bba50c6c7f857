import os, deepspeed, torch

model = torch.nn.Linear(4, 4)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    "zero_optimization": {"stage": 3},
})
saved = engine.save_16bit_model("weights")
print("saved:", saved, "- the folder is there:", os.path.exists("weights"))
