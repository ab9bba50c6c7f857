"""What both sides of the gate train with."""

from __future__ import annotations

SEED = 0
LR = 3e-3  # constant: a schedule is a function of the step alone, tested elsewhere
BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.1
CLIP_NORM = 0.5  # below most of the norms, so that clipping acts in most steps
# One step that is large beside the weights: after a small one, the change of a norm's weight would
# be known no better than the last place of 1.0.
SGD_LR = 64.0
