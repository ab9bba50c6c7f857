import deepspeed, torch
from deepspeed.accelerator import get_accelerator
get_accelerator().is_fp16_supported = lambda: True  # for CPUs without fp16 instructions

def update(stage):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, bias=False)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "fp16": {"enabled": True, "loss_scale": 1024},
        "zero_optimization": {"stage": stage},
    })
    before = model.weight.detach().clone()
    engine.backward(engine(torch.ones(1, 4).half()).float().sum())
    engine.step()
    return (model.weight - before).abs().max().item()

print("stage 1 moves a weight by", update(1))  # lr x gradient = 0.5
print("stage 0 moves a weight by", update(0))  # 1024 times less: nothing is learned
