import deepspeed, torch
from transformers import AutoModelForCausalLM, LlamaConfig

deepspeed.init_distributed("gloo")
config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128,
                     num_hidden_layers=2, num_attention_heads=4)
ds = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
with deepspeed.zero.Init(config_dict_or_path=ds):
    model = AutoModelForCausalLM.from_config(config)
weight = model.get_input_embeddings().weight
with deepspeed.zero.GatheredParameters([weight]):
    print("asked for", config.initializer_range, "got", weight.std().item())
