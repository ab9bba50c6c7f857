import deepspeed, torch
from deepspeed.pipe import PipelineModule

deepspeed.init_distributed("gloo")

def step(stage):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 4, bias=False) for _ in range(2)]
    model = PipelineModule(layers, num_stages=2, loss_fn=lambda out, _: 100 * out.sum())
    engine, *_ = deepspeed.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    })
    before = next(model.parameters()).detach().clone()
    engine.train_batch(iter([(torch.ones(1, 4), torch.ones(1))]))
    moved = (next(model.parameters()).detach() - before).square().sum()
    torch.distributed.all_reduce(moved)
    return f"the weights moved by {moved.sqrt().item():.4f}, norm {engine.get_global_grad_norm()}"

for stage in (1, 0):  # SGD of rate 1 moves the weights by the clipped norm, 1
    print(f"stage {stage}: {step(stage)}")
