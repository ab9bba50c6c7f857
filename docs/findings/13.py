import deepspeed, torch
import deepspeed.runtime.sequence_parallel.parallel_state_sp as mpu
from deepspeed.pipe import PipelineModule

deepspeed.init_distributed("gloo")

def engine_of(model, mpu=None, **section):
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), mpu=mpu, config={
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}, **section})[0]

def say_norm(when):
    engine = engine_of(torch.nn.Linear(4, 4, bias=False))
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    print(when, float(engine.get_global_grad_norm()))

say_norm("at first:")  # 16 elements of 1: 4
mpu.initialize_sequence_parallel(2)
engine_of(torch.nn.Linear(4, 4), mpu, sequence_parallel_size=2).destroy()
say_norm("after sequence parallelism:")
engine_of(PipelineModule([torch.nn.Linear(4, 4) for _ in range(2)], num_stages=2)).destroy()
say_norm("after pipeline stages:")
