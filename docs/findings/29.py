import deepspeed, torch
from deepspeed.utils import safe_get_full_fp32_param as master

def step(stage, clip):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8, bias=False)
    half = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": clip,
        "zero_optimization": {"stage": stage, "reduce_scatter": False},
        "optimizer": {"type": "Muon", "params": {"lr": 0.1, "momentum": 0.0}},
        **(half if stage == 1 else {})})  # ZeRO-1 in bf16 has an optimizer class of its own
    before = master(model.weight).clone()
    engine.backward(engine(torch.randn(4, 8, dtype=model.weight.dtype)).square().mean())
    engine.step()
    moved = float((master(model.weight) - before).norm())
    return f"norm {float(engine.get_global_grad_norm()):.3f}, weights moved by {moved:.3f}"

for stage in (1, 2, 3):
    print(f"stage {stage}: {step(stage, 0.0)}; clipped at 1.0: {step(stage, 1.0)}")
