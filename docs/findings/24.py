import copy, torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

def run(steps, weight, saved=None):
    weight = torch.nn.Parameter(weight.clone())
    adam = DeepSpeedCPUAdam([weight], lr=1e-2, betas=(0.9, 0.95))
    if saved:
        adam.load_state_dict(saved)
    for step in steps:
        weight.grad = torch.randn(1000, generator=torch.Generator().manual_seed(step))
        adam.step()
    return weight.detach(), copy.deepcopy(adam.state_dict())

start = torch.ones(1000)
whole, _ = run(range(200), start)
half, saved = run(range(9), start)
again, _ = run(range(9, 200), half, saved)
differing = (whole != again).sum().item()
print(f"{differing} of 1000 weights differ, by {(whole - again).abs().max().item()} at most")
