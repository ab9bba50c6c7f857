import deepspeed, torch
import deepspeed.runtime.sequence_parallel.parallel_state_sp as mpu
from torch.distributed.nn.functional import all_gather

deepspeed.init_distributed("gloo")
mpu.initialize_sequence_parallel(2)

def norm(stage):
    model = torch.nn.Linear(4, 4, bias=False)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), mpu=mpu, config={
            "train_micro_batch_size_per_gpu": 1,
            "sequence_parallel_size": 2,
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
            "zero_optimization": {"stage": stage},
        })
    loss = engine(torch.ones(8, 4)).sum(1).mean()  # over this rank's half of the tokens
    loss = sum(all_gather(loss, group=mpu.get_sequence_parallel_group())) / 2
    engine.backward(loss)
    engine.step()
    return float(engine.get_global_grad_norm())

for stage in (3, 2, 1):  # 16 elements of 1: 4
    print(f"stage {stage}: norm {norm(stage)}")
