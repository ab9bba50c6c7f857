import deepspeed, torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

deepspeed.init_distributed("gloo")

def norm(marked):
    half = torch.nn.Linear(4, 2, bias=False)  # of four rows, each rank has two
    half.weight.tensor_model_parallel = marked
    topology = PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1)
    model = PipelineModule([half], topology=topology, loss_fn=lambda out, _: out.sum())
    engine, *_ = deepspeed.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": 1},
    })
    engine.train_batch(iter([(torch.ones(1, 4), torch.ones(1))]))
    return float(engine.get_global_grad_norm())

print(f"marked: norm {norm(True):.3f}, unmarked: norm {norm(False):.3f}")
