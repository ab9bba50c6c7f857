import pathlib, time, deepspeed, torch

deepspeed.init_distributed("gloo")
model = torch.nn.Linear(4, 4)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    "zero_optimization": {"stage": 1},
})
save, latest = torch.save, pathlib.Path("saved/latest")

def slow_save(state, path, **options):
    time.sleep(5)  # a slow disk
    print("latest says", latest.read_text(), "but", path, "exists:", pathlib.Path(path).exists())
    save(state, path, **options)

if torch.distributed.get_rank() == 1:
    torch.save = slow_save
engine.save_checkpoint("saved")
