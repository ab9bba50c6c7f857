"""An optimizer, a loss, an attention, a schedule and a metric of one's own (docs/own_code.md)."""

import torch
from torch.nn import functional

from harness.config.own import attention, loss, metric, optimizer, schedule


@optimizer("plain_sgd", state_bytes=4, takes=("momentum",))
def plain_sgd(groups, lr, weight_decay, momentum):
    """Return torch's SGD, which equals optim.name=sgd."""
    return torch.optim.SGD(groups, lr=lr, weight_decay=weight_decay, momentum=momentum)


@loss("tempered")
def tempered(logits, labels, temperature=1.0):
    """Return the cross-entropy of logits that are divided by own.temperature."""
    tokens = (logits / temperature).flatten(0, 1)
    losses = functional.cross_entropy(tokens, labels.flatten(), reduction="none")
    return losses.view_as(labels)  # cross_entropy returns 0 for the label -100


@attention("written_out", keeps_scores=True)
def written_out(module, query, key, value, attention_mask, scaling=None, **_):
    """Return softmax attention, (micro_batch, seq_len, heads, head_dim), and no weights."""
    copies = query.shape[1] // key.shape[1]  # grouped queries share a key
    key, value = (heads.repeat_interleave(copies, 1) for heads in (key, value))
    scores = query @ key.mT * (scaling or query.shape[-1] ** -0.5)
    scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), None


@schedule("staircase")
def staircase(progress, stairs=4):
    """Return the height of the stair that `progress` has reached, of own.stairs down to 0."""
    return 1 - min(int(progress * stairs), stairs) / stairs


@metric("largest_weight")
def largest_weight(run, step):
    """Return the largest absolute value of this rank's share of the weights."""
    weights = (fragment.tensors["weight"] for fragment in run.engine.fragments(states=False))
    return torch.stack([weight.abs().max().float() for weight in weights]).max()
