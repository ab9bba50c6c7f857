from deepspeed.runtime.config import DeepSpeedConfig

config = DeepSpeedConfig({
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimisation": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"learning_rate": 1e-4}},
})
print("stage", int(config.zero_optimization_stage), config.optimizer_params)
