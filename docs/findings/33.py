import deepspeed, torch

def moments(stage, sums):
    model = torch.nn.Linear(8, 8)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": stage}, "data_types": {"grad_accum_dtype": sums},
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True,
                 "bf16_optimizer_states": True}})
    engine.backward(engine(torch.ones(1, 8, dtype=torch.bfloat16)).sum())
    engine.step()
    (state,) = engine.optimizer.optimizer.state.values()
    return f"{type(engine.optimizer).__name__}, {state['exp_avg'].dtype}"

for stage, sums in ((1, "fp32"), (1, "bf16"), (2, "fp32")):
    print(f"stage {stage}, sums in {sums}: {moments(stage, sums)}")
