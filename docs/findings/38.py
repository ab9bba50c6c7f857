import faulthandler, deepspeed, torch
from deepspeed.pipe import PipelineModule

deepspeed.init_distributed("gloo")
faulthandler.dump_traceback_later(30, exit=True)

def step(groups_of_stage):
    layers = [torch.nn.Linear(4, 4) for _ in range(2)]
    model = PipelineModule(layers, num_stages=2, loss_fn=lambda out, _: out.sum())
    weight, bias = model.parameters()
    groups = [[weight, bias]] if groups_of_stage[model.stage_id] == 1 else [[weight], [bias]]
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=[{"params": group} for group in groups], config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
            "zero_optimization": {"stage": 1},
        })
    engine.train_batch(iter([(torch.ones(1, 4), torch.ones(1))]))

for groups_of_stage in ([2, 2], [1, 2]):
    step(groups_of_stage)
    torch.distributed.barrier()
    print(f"groups of each stage {groups_of_stage}: took a step", flush=True)
