"""The precision of products of fp32 matrices on GPUs, which is torch's or the user's."""

from __future__ import annotations

from typing import Any

import torch

_KEY = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"


def float32_products() -> dict[str, Any]:
    """Return the event that says in what products of fp32 are computed; nothing is changed."""
    if torch.get_float32_matmul_precision() == "highest":
        message = f"products of fp32 are computed in fp32; {_KEY}=1 in the environment takes TF32"
    else:
        message = f"products of fp32 are rounded to TF32 ({_KEY}, or this program's own setting)"
    return {"kind": "float32_products", "message": message}
