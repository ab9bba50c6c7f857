import deepspeed, torch
from deepspeed.pipe import PipelineModule

deepspeed.init_distributed("gloo")

for timed in (False, True):
    layers = [torch.nn.Linear(4, 4) for _ in range(2)]
    model = PipelineModule(layers, num_stages=2, loss_fn=lambda out, _: out.sum())
    engine, *_ = deepspeed.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "wall_clock_breakdown": timed,
    })
    try:
        engine.train_batch(iter([(torch.ones(1, 4), torch.ones(1))]))
        print(f"timed {timed}: took a step")
    except AssertionError as error:
        print(f"timed {timed}: {error}")
    except RuntimeError:
        pass  # the other rank has left
