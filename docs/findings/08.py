import deepspeed, torch

deepspeed.init_distributed("gloo")
deepspeed.comm.all_reduce(torch.ones(4))
torch.distributed.destroy_process_group()
