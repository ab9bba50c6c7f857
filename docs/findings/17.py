import deepspeed, torch

model = torch.nn.Sequential(torch.nn.Linear(8, 8))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    "tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": [
        {"patterns": ["0.weight"], "partition_type": "column"}]}},
})
print(engine.train_batch_size(), "samples a step:", engine.dp_world_size, "data-parallel rank x",
      "4 samples x", engine.gradient_accumulation_steps(), "accumulation steps")
