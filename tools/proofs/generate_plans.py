"""Write harness/layout/plans.json: how transformers would divide each decoder over ranks.

Taken from the config classes of the installed transformers (base_model_tp_plan, base_model_ep_plan,
base_model_pp_plan), so that the floors below the models know them without importing it. Run again
after an upgrade of transformers:

    python tools/proofs/generate_plans.py

{"transformers": version, "tensor": [{"families": [model types], "plan": ...}, ...], "expert": ...,
"pipeline": ..., "without_sdpa": [model types]}: model types with equal plans share an entry. A plan
of tensors or experts gives a style for each module of the base model, "layers.*.mlp.up_proj" for
that of every layer; a plan of pipeline stages gives two lists for each module, of what it takes and
what it returns.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

OUTPUT = Path(__file__).resolve().parents[2] / "harness" / "layout" / "plans.json"
_ATTRIBUTES = {
    "tensor": "base_model_tp_plan",
    "expert": "base_model_ep_plan",
    "pipeline": "base_model_pp_plan",
}


def build_plans() -> dict[str, Any]:
    """The content of plans.json."""
    configs = {name: CONFIG_MAPPING[name] for name in sorted(CONFIG_MAPPING_NAMES)}
    plans: dict[str, Any] = {"transformers": transformers.__version__}
    for kind, attribute in _ATTRIBUTES.items():
        entries: dict[str, dict[str, Any]] = {}
        for name, config in configs.items():
            if plan := getattr(config, attribute, None):
                entry = entries.setdefault(json.dumps(plan), {"families": [], "plan": plan})
                entry["families"].append(name)
        plans[kind] = list(entries.values())
    plans["without_sdpa"] = [
        name
        for name, decoder in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
        if not getattr(transformers, decoder)._supports_sdpa
    ]
    return plans


def as_text() -> str:
    """The exact content of plans.json."""
    return json.dumps(build_plans(), indent=1) + "\n"


if __name__ == "__main__":
    OUTPUT.write_text(as_text(), encoding="utf-8")
    print(f"wrote {OUTPUT}")
