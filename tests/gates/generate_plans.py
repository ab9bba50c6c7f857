"""Write harness/layout/plans.json: the parallelism plans of every decoder in transformers.

They are taken from the config classes of the installed transformers (base_model_tp_plan,
base_model_ep_plan), so that the packages below the models know them without
importing it. Run it again after an upgrade of transformers:

    python -m tests.gates.generate_plans

{"transformers": version, "tensor": [{"families": [model types], "plan": ...}, ...], "expert": ...,
"keys": ..., "without_sdpa": [model types]}: model types with equal plans share an entry. A plan
gives a style for each module of the base model, where "layers.*.mlp.up_proj" means every layer.
"keys" are the keys of a config.json that change the model or its export:
the config class has or accepts them, and the source of the model's module reads them. "most_keys"
are the keys of most decoders; each family lists those that it adds (+) and lacks (-).
"""

import dataclasses
import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Collection
from types import ModuleType
from typing import Any

import transformers
from transformers import PretrainedConfig, masking_utils, modeling_rope_utils, modeling_utils
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from harness.launch.ranks import REPOSITORY

OUTPUT = REPOSITORY / "harness" / "layout" / "plans.json"
_ATTRIBUTES = {"tensor": "base_model_tp_plan", "expert": "base_model_ep_plan"}

_READ = re.compile(r'config\.(\w+)|getattr\(\s*(?:self\.)?config,\s*"(\w+)"')
_ASKED = re.compile(r'getattr\(\s*(?:self\.)?config,\s*"(\w+)"')
_TAKEN = re.compile(r'kwargs\.(?:pop|get|setdefault)\(\s*"(\w+)"')
_OWN = re.compile(r"self\.(\w+)")
# Exported, regardless of the computation.
_EXPORTED = {"bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "tie_word_embeddings"}
_PARTIAL = "partial_rotary_factor"
_EVERYWHERE = (masking_utils, modeling_rope_utils, modeling_utils)


def build_plans() -> dict[str, Any]:
    """Return the content of plans.json."""
    configs = {name: CONFIG_MAPPING[name] for name in sorted(CONFIG_MAPPING_NAMES)}
    plans: dict[str, Any] = {"transformers": transformers.__version__}
    for kind, attribute in _ATTRIBUTES.items():
        entries: dict[str, dict[str, Any]] = {}
        for name, config in configs.items():
            if plan := getattr(config, attribute, None):
                entry = entries.setdefault(json.dumps(plan), {"families": [], "plan": plan})
                entry["families"].append(name)
        plans[kind] = list(entries.values())
    keys = {
        name: _keys(configs[name], getattr(transformers, decoder))
        for name, decoder in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
    }
    plans["most_keys"] = most = _of_most(keys.values())
    differences: dict[str, list[str]] = {}
    for name, own in keys.items():
        signed = [*(f"+{k}" for k in own - {*most}), *(f"-{k}" for k in {*most} - own)]
        differences.setdefault(" ".join(sorted(signed)), []).append(name)
    plans["keys"] = [
        {"families": families, "plan": signed} for signed, families in differences.items()
    ]
    plans["without_sdpa"] = [
        name
        for name, decoder in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
        if not getattr(transformers, decoder)._supports_sdpa
    ]
    return plans


def _of_most(keys: Collection[set[str]]) -> list[str]:
    """Return the keys that more than half of the sets hold."""
    counts = Counter(key for own in keys for key in own)
    return sorted(key for key, count in counts.items() if count > len(keys) / 2)


def _keys(config: Any, model: Any) -> set[str]:
    """Return the keys of a config.json that a decoder reads."""
    classes = [c for c in config.__mro__ if issubclass(c, PretrainedConfig)]
    classes = classes[: classes.index(PretrainedConfig)]
    base = {field.name for field in dataclasses.fields(PretrainedConfig)}
    declared = {
        f.name for c in classes if dataclasses.is_dataclass(c) for f in dataclasses.fields(c)
    }
    own = (declared - base) | _EXPORTED
    if any("self.standardize_rope_params(" in inspect.getsource(c) for c in classes):
        own.add("rope_parameters")  # that method creates it
    module = sys.modules[model.__module__]
    everywhere = set[str]().union(*map(_read, _EVERYWHERE))
    read = _read(module) | everywhere | _EXPORTED | {n for c in classes for n in _self_read(c)}
    taken = {name for c in classes for name in _taken(c, "__post_init__")}
    if "rope_parameters" in own:  # a field of that name is ignored
        taken |= _taken(config, "convert_rope_params_to_dict") - ({"rope_scaling"} & declared)
    if _PARTIAL not in inspect.getsource(module):  # put into rope_parameters for every model
        taken -= {_PARTIAL}
    asked = set(_ASKED.findall(inspect.getsource(module))) & everywhere.union(_read(module))
    pairs = [{*pair} for pair in config.attribute_map.items()]  # two names of one value
    named = {name for pair in pairs if pair & own and pair & read for name in pair}
    return (own & read) | named | taken | asked


def _read(module: ModuleType) -> set[str]:
    pairs = _READ.findall(inspect.getsource(module))
    return {name for pair in pairs for name in pair if name}


def _self_read(config: Any) -> set[str]:
    """Return the attributes that a config class reads, other than by declaring them."""
    return set(_OWN.findall(inspect.getsource(config)))


def _taken(config: Any, method: str) -> set[str]:
    """Return the undeclared keys that a config class's method accepts, also through super()."""
    taken = set[str]()
    for owner in config.__mro__:
        if owner is PretrainedConfig or method not in vars(owner):
            continue
        source = inspect.getsource(vars(owner)[method])
        taken |= {*_TAKEN.findall(source)}
        if "super()" not in source:
            break
    return taken


def as_text() -> str:
    """Return the exact content of plans.json."""
    return json.dumps(build_plans(), indent=1) + "\n"


if __name__ == "__main__":
    OUTPUT.write_text(as_text(), encoding="utf-8")
    print(f"wrote {OUTPUT}")
