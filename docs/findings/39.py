import deepspeed, torch
from deepspeed.utils import safe_get_full_fp32_param

deepspeed.init_distributed("gloo")

for round_robin in (False, True):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8, bias=False) for _ in range(4)])
    engine, *_ = deepspeed.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": 2, "round_robin_gradients": round_robin},
    })
    own = [torch.equal(safe_get_full_fp32_param(weight), weight) for weight in model.parameters()]
    if torch.distributed.get_rank() == 0:
        print(f"round robin {round_robin}: each weight has its own values: {own}")
