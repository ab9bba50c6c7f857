import deepspeed, torch
from deepspeed.utils import groups

def engine(**more):
    model = torch.nn.Linear(8, 8)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **more}})[0]

def keeps_a_second_copy(engine):
    engine(torch.ones(1, 8))
    return engine.module.weight.ds_secondary_tensor is not None

print("without hpZ:", keeps_a_second_copy(engine()))
with_it = engine(zero_hpz_partition_size=2)
print("with hpZ:", keeps_a_second_copy(with_it))
with_it.destroy()
print("without hpZ, after it:", keeps_a_second_copy(engine()))
try:
    deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 2, "zero_optimization": {
        "stage": 3, "zero_hpz_partition_size": 2}})
except AssertionError as error:
    print("AssertionError:", error)
