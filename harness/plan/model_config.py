"""`model.name` -> a Hugging Face model config as a plain dict, without transformers.

A name is looked up as a preset, a run folder, a config.json, a folder with one, and a hub id, in
this order.
"""

import json
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping
from copy import deepcopy
from difflib import get_close_matches
from functools import cache
from math import log
from pathlib import Path
from typing import Any

from harness.config.assignments import IMPLIED, MAX_FILE_BYTES, beyond_bounds
from harness.config.run_config import RunConfig, run_and_step, run_instead
from harness.errors import ConfigError, Unusable
from harness.files.hub import hub_answers
from harness.files.paths import near_path
from harness.files.regular_file import read_json
from harness.layout.code_exports import as_plain
from harness.layout.families import DEVIATION_KEYS, SIZE_KEYS, family_of
from harness.layout.recompute import REVERSIBLE
from harness.layout.tensor import keys_read
from harness.plan.overrides import DROPOUT_ENDINGS, overridden, value_problems
from harness.plan.rotary import extended

_PRESETS = Path(__file__).with_name("presets.toml")

_NEAR = 0.6
"""Minimum similarity for suggesting a preset."""
# Decoders whose hub ids have no owner; all others are OWNER/NAME.
_OWNERLESS = ("distilgpt2", "gpt2", "gpt2-large", "gpt2-medium", "gpt2-xl", "openai-gpt")

_OTHER_LISTS = ("architectures", "_token_id", "_only_layers")
"""Endings of keys whose lists are not per layer, even if they have one entry per layer by chance.
"""


@cache
def presets() -> dict[str, dict[str, Any]]:
    """Return the bundled presets by name: "source", "config"; of some also "lr" and "lr_source"."""
    table: dict[str, dict[str, Any]] = tomllib.loads(_PRESETS.read_text(encoding="utf-8"))
    for preset in table.values():
        base = table[preset["base"]] if "base" in preset else {}
        # TOML has no null. Without the key, the class's default would apply: Mistral's is a sliding
        # window.
        nulls = dict.fromkeys(preset.get("null", base.get("null", ())))
        preset["config"] = base.get("config", {}) | nulls | preset["config"]
    return table


def preset_names() -> list[str]:
    """Return the names of the bundled presets."""
    return sorted(presets())


def presets_as_text(word: str = "") -> str:
    """Return the bundled presets with `word` in their names, by family and size: name, parameters,
    kind, longest sample.
    """
    rows = []
    for name, preset in presets().items():
        if word not in name:
            continue
        (count,) = re.findall(r"([\d,]+) parameters", preset["source"])
        config = preset["config"]
        longest = config.get("max_position_embeddings") or config.get("n_positions") or "any"
        row = f"{name:18} {count:>16} parameters  {config['model_type']:12} {longest:>8} positions"
        rows.append((config["model_type"], int(count.replace(",", "")), row))
    return "\n".join(row for _, _, row in sorted(rows))


def preset_rate(source: str) -> tuple[float, str] | None:
    """Return the learning rate that a preset cites and its source; None if it cites none."""
    _, is_preset, name = source.partition("preset ")
    preset = presets().get(name, {}) if is_preset else {}
    return (preset["lr"], preset["lr_source"]) if "lr" in preset else None


def published_weights(model: str) -> str | None:
    """Return the hub id of the weights that a preset was published with; None for other models."""
    source = presets().get(model, {}).get("source", "")
    on_hub = re.match(r"https://huggingface\.co/([^/ ]+/[^/ ]+)", source)
    return on_hub[1] if on_hub else None


def load_model_config(
    run_config: RunConfig, note: Callable[[str, str], None] = lambda kind, message: None
) -> tuple[dict[str, Any], str]:
    """Return the config of `model.name`, with overrides and dropout applied, and its source.
    `note`: as in `overridden`.

    The source is "preset NAME", or the folder, file or hub id of the config (which transformers
    needs for architectures with their own code). Raises ConfigError.
    """
    key = "model.name"
    if run_config.origin(key) == IMPLIED:
        key = "model.init_from"
    config, source = find_model_config(run_config.model.name, run_config.origin(key), key)
    if not isinstance(config.get("model_type"), str):
        name = run_config.model.name
        raise ConfigError(f"model.name is {name!r}, but {source} has no model_type")
    merged = overridden(config, run_config, source, note)
    config = _of_its_layers(config, merged, run_config)
    config.pop("quantization_config", None)  # describes the files; training is not quantized
    config = extended(config, run_config) | _dropouts(config, run_config)
    if run_config.model.init_std is not None:
        reads = keys_read(config["model_type"]) or ()
        key = next((key for key in DEVIATION_KEYS if key in reads), DEVIATION_KEYS[0])
        config[key] = run_config.model.init_std
    if run_config.model.reversible:
        config[REVERSIBLE] = True
    if problems := list(value_problems(config, run_config, source)):
        raise ConfigError(problems)
    return config, source


def find_model_config(
    name: str, origin: str = "default", key: str = "model.name"
) -> tuple[dict[str, Any], str]:
    """Return the unchanged config of a named model, and its source. Raises ConfigError."""
    if name in presets():
        return deepcopy(presets()[name]["config"]), f"preset {name}"
    path = Path(name).expanduser()
    run_plan = run_and_step(name)[0] / "plan.json"
    if run_plan.is_file():
        saved = _read_config(run_plan, name)
        config, source = saved.get("model_config"), saved.get("model_source")
        if not (isinstance(config, dict) and isinstance(source, str)):
            raise ConfigError(f"{key} is {name!r} ({origin}): {run_plan} holds no model")
        return config, source
    if run := run_instead(path):
        raise ConfigError(f"{key} is {name!r} ({origin}), which is no model: set {key}={run}")
    if path.exists():
        return _read_config(path / "config.json" if path.is_dir() else path, name), str(path)
    if name.endswith(".json") or name.startswith((".", "/", "~")) or name.count("/") > 1:
        near = _nearest(name, key) if key != "model.name" else ""
        raise ConfigError(f"{key} is {name!r} ({origin}): there is no such file or folder{near}")
    if "/" not in name and name not in _OWNERLESS:
        problem = f"{_nowhere(name, origin, key)}, and a hub id is OWNER/NAME"
        raise ConfigError(f"{problem}{_nearest(name, key)}")
    return _read_config(_from_hub(name, origin, key), name), name


def merge_first(folder: Path) -> str:
    """Return what to do with a folder that holds an adapter."""
    code = (
        "from peft import AutoPeftModelForCausalLM as Model; "
        f"Model.from_pretrained({json.dumps(str(folder))})"
        '.merge_and_unload().save_pretrained("MERGED")'
    )
    return (
        f"{folder} holds an adapter: merge it into its model first, with python -c "
        f"{shlex.quote(code)}, and name MERGED, with the model's tokenizer in data.tokenizer"
    )


def _read_config(path: Path, name: str) -> dict[str, Any]:
    try:
        config = read_json(path, MAX_FILE_BYTES, links=True)
    except FileNotFoundError as error:
        if (path.parent / "adapter_config.json").is_file():
            raise ConfigError(merge_first(path.parent)) from None
        raise ConfigError(f"model.name is {name!r}, but {path} cannot be read: {error}") from None
    except (OSError, Unusable) as error:
        raise ConfigError(f"model.name is {name!r}, but {path} cannot be read: {error}") from None
    if problem := beyond_bounds(config):
        raise ConfigError(f"model.name is {name!r}, but in {path} {problem}")
    if not isinstance(config, dict):
        raise ConfigError(f"model.name is {name!r}, but {path} is not an object {{...}}")
    return as_plain(config)


def _from_hub(name: str, origin: str, key: str) -> Path:
    """Return the path of a hub model's config.json in the local cache, downloading it if needed."""
    offline = not hub_answers()
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(name, "config.json", etag_timeout=5, local_files_only=offline))
    except Exception as error:  # the hub client raises a dozen unrelated classes
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        if offline:
            reason = (
                "it is not in the local cache, and the hub cannot be reached from here: set "
                f"{key}=FOLDER"
            )
        raise ConfigError(
            f"{_nowhere(name, origin, key)}, and its config.json could not be fetched from the "
            f"hub ({reason}){_nearest(name, key)}"
        ) from None


def _nowhere(name: str, origin: str, key: str) -> str:
    kinds = "preset, file or folder" if key == "model.name" else "folder or run"
    return f"{key} is {name!r} ({origin}): there is no such {kinds} here"


def _nearest(name: str, key: str) -> str:
    """Return similar names of presets, or of folders for weights, to end a sentence."""
    path, word, none = Path(name).expanduser(), name.rpartition("/")[2], ""
    if key == "model.name":
        near = _spelt_like(word, preset_names())
        if not near or _size(word) not in (None, _size(near[0])):
            near = _of_similar_size(word) or near
        none = "; train.py --presets lists the presets"
    else:
        folder = path.parent
        models = [each.name for each in folder.glob("*") if _holds_model(each)]
        near = [str(folder / each) for each in _spelt_like(word, models)]
        if not near and (found := near_path(path)) is not None and _holds_model(found):
            near = [str(found)]
    return f"; did you mean {' or '.join(near)}?" if near else none


def _spelt_like(word: str, names: list[str]) -> list[str]:
    """Return up to three similar names; gpt-2 and gpt2 count as the same."""
    letters = {"".join(filter(str.isalnum, name.lower())): name for name in names}
    own = "".join(filter(str.isalnum, word.lower()))
    return [letters[each] for each in get_close_matches(own, letters, n=3, cutoff=_NEAR)]


def _of_similar_size(name: str) -> list[str]:
    """Return up to three presets of a name's family whose sizes are nearest, smallest first; none
    if the name gives no family or no size. A size ends in b or m: gpt-2 has none.
    """
    size, family = _size(name), _family(name)
    sizes = {each: _size(each) for each in preset_names() if family and _family(each) == family}
    relatives = [(abs(log(n / size)), n, each) for each, n in sizes.items() if n and size]
    nearest = sorted(relatives)[:3]
    return [each for _, _, each in sorted(nearest, key=lambda near: near[1:])]


def _size(name: str) -> float | None:
    """Return the number of parameters that a name states: 8e9 for llama-3-8b, 5.6e10 for
    mixtral-8x7b.
    """
    matches = re.findall(r"(?:(\d+)x)?(\d+(?:\.\d+)?)([bm])(?![a-z])", name.lower())
    if not matches:
        return None
    experts, count, unit = matches[0]
    return float(count) * int(experts or 1) * (1e9 if unit == "b" else 1e6)


def _family(name: str) -> str:
    """Return the letters with which a name begins: llama of Llama-3-8B and of llama2-13b."""
    return re.match(r"[a-z]*", name.lower())[0]  # type: ignore[index]


def _holds_model(folder: Path) -> bool:
    """Return True if a folder holds a model or a run."""
    return any((folder / name).is_file() for name in ("config.json", "plan.json"))


def _of_its_layers(
    config: Mapping[str, Any], merged: dict[str, Any], run_config: RunConfig
) -> dict[str, Any]:
    """Return a config with its per-layer lists cut to the number of layers in model.overrides.

    Raises ConfigError if added layers have no values.
    """
    keys = [key for key in SIZE_KEYS["layers"] if isinstance(config.get(key), int)]
    before, now = ((source.get(keys[0]) if keys else None) for source in (config, merged))
    if not isinstance(now, int) or isinstance(now, bool) or now < 1 or now == before:
        return merged
    overrides, problems = run_config.model.overrides, []
    for key, value in config.items():
        is_of_layers = isinstance(value, list) and not key.endswith(_OTHER_LISTS)
        if not is_of_layers or len(value) != before or key in overrides:
            continue
        if now > len(value):
            origin = run_config.origin(f"model.overrides.{keys[0]}")
            problems.append(
                f"model.overrides.{keys[0]} is {now} ({origin}), but {key} has a value for each of "
                f"{before} layers: set model.overrides.{key}, too"
            )
        merged[key] = value[:now]
    if problems:
        raise ConfigError(problems)
    return merged


def _dropouts(config: Mapping[str, Any], run_config: RunConfig) -> dict[str, float]:
    """Return the config's dropout probabilities that the run sets. Raises ConfigError."""
    own = (key for key in config if key.endswith(DROPOUT_ENDINGS))
    keys = {*own, *family_of(config["model_type"]).dropouts}
    attention = {key for key in keys if key.startswith("att")}
    embedding = {key for key in keys if key.startswith("emb")}
    kinds = {
        "attention": attention,
        "embedding": embedding,
        "residual": keys - attention - embedding,
    }
    dropouts, problems = dict[str, float](), []
    if run_config.model.dropout is not None:
        dropouts = dict.fromkeys(keys, run_config.model.dropout)
    for kind, kind_keys in kinds.items():
        key, value = f"model.{kind}_dropout", getattr(run_config.model, f"{kind}_dropout")
        if value is not None and not kind_keys:
            problems.append(
                f"{key} is {value} ({run_config.origin(key)}), but {config['model_type']} models "
                f"have only {', '.join(sorted(keys))}: remove it"
            )
        elif value is not None:
            dropouts |= dict.fromkeys(kind_keys, value)
    if problems:
        raise ConfigError(problems)
    return dropouts
