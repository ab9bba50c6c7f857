import deepspeed, torch
from transformers import AutoModelForCausalLM, LlamaConfig

model = AutoModelForCausalLM.from_config(LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=128,
    num_hidden_layers=1, num_attention_heads=4))
before = tuple(model.lm_head.weight.shape)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "tensor_parallel": {"autotp_size": 2},
})
saved = engine.save_16bit_model("exported")
if torch.distributed.get_rank() == 0:
    after = tuple(torch.load("exported/pytorch_model.bin")["lm_head.weight"].shape)
    print(f"saved: {saved}, the head was {before} and is {after}")
