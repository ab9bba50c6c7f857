import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

def loss_fn(head, x, y):
    return torch.nn.functional.cross_entropy(head(x), y, reduction="sum")

def gradients(tiled):
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 16, bias=False)
    x = torch.randn(1, 32, 8, requires_grad=True)
    y = torch.randint(16, (1, 32))
    if tiled:
        loss = TiledFusedLogitsLoss.apply(loss_fn, head, x, y, None, 4, [head.weight], "sum")
    else:
        loss = loss_fn(head, x[0], y[0])
    (loss / y.numel()).backward()
    return f"of the input {x.grad.norm():.6f}, of the head {head.weight.grad.norm():.6f}"

print("whole: gradient", gradients(tiled=False))
print("tiled: gradient", gradients(tiled=True))
