import deepspeed, torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule, TiedLayerSpec

get_accelerator().is_fp16_supported = lambda: True  # for CPUs without fp16 instructions
deepspeed.init_distributed("gloo")

def apart(dtype):
    tied = TiedLayerSpec("tied", torch.nn.Linear, 4, 4, bias=False)
    model = PipelineModule([tied, tied], num_stages=2, loss_fn=lambda out, _: out.sum())
    engine, *_ = deepspeed.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        "fp16": {"enabled": True, "loss_scale": 1},
        "data_types": {"grad_accum_dtype": dtype},
        "zero_optimization": {"stage": 1},
    })
    engine.train_batch(iter([(torch.ones(1, 4).half(), torch.ones(1))]))
    copies = [torch.empty(4, 4, dtype=torch.half) for _ in range(2)]
    torch.distributed.all_gather(copies, next(model.parameters()).detach())
    return (copies[0] - copies[1]).abs().max().item()

for dtype in ("fp16", "fp32"):
    print(f"sums in {dtype}: the two copies of the weight are {apart(dtype):.2f} apart")
