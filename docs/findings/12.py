import deepspeed, torch
from deepspeed.pipe import PipelineModule

deepspeed.init_distributed("gloo")

def learning(interval):
    torch.manual_seed(0)
    layers = [torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)]
    model = PipelineModule(
        layers, num_stages=1, loss_fn=lambda out, _: out.exp().sum(),
        activation_checkpoint_interval=interval, checkpointable_layers=["Embedding", "Linear"])
    engine, *_ = deepspeed.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    })
    before = [layer.weight.detach().clone() for layer in layers]
    engine.train_batch(iter([(torch.arange(8)[None], torch.ones(1))]))
    return [type(layer).__name__ for layer, b in zip(layers, before) if (layer.weight != b).any()]

print("without checkpointing, these learn:", learning(interval=0))
print("with checkpointing, these learn:", learning(interval=1))
