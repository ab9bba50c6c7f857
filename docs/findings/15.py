import deepspeed, torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from transformers import AutoModelForCausalLM, MistralConfig

deepspeed.init_distributed("gloo")
rank = torch.distributed.get_rank()

def mistral(window):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(attn_implementation="sdpa", config=MistralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, sliding_window=window))

with torch.no_grad():
    ids = torch.arange(64)[None]
    expected = {window: mistral(window)(ids).logits.chunk(2, 1)[rank] for window in (4, None)}
    model = mistral(window=4)
    UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 2, micro_batch_size=1)
    half = ids.chunk(2, 1)[rank]  # the positions are the same numbers
    logits = model(half, position_ids=half).logits

off = {window: (logits - e).abs().max().item() for window, e in expected.items()}
print(f"rank {rank}: off by {off[4]:.4f} from the window of 4, {off[None]:.4f} from none")
