"""Compares a plan with the run that it resumes or branches from."""

from collections.abc import Iterator, Mapping
from typing import Any

from harness.config.run_config import RECORDED_KEYS, RunConfig
from harness.config.sections import RECORDED
from harness.files.paths import script
from harness.layout.attention_table import ATTENTIONS
from harness.layout.shape import Shape

# Settings that a resumed run may change freely: they affect duration, frequency and layout, but not
# the training result. All others require resume.allow.
FREE_SECTIONS = (
    *("eval", "save", "log", "profile", "sample", "layout", "guard", "plan", "run", "resume"),
)
FREE_KEYS = (
    *("train.steps", "train.tokens", "train.epochs", "train.micro_batch"),
    *("model.checkpointing", "model.activation_offload", "model.mlp_tiles"),
    *("model.kernels", "model.compile"),
    *("data.cache_dir", "data.prefetch", "data.tokens_per_batch", "data.reservoir"),
)

# Keys of optim.* that exclude another key, for which a saved plan holds the default.
_EXCLUDE = {"warmup_ratio": "warmup_steps", "clip_value": "clip_norm"}

# Settings that a branch must share with the run it starts from.
BRANCH_KEEPS = ("precision", "model_config", "data_fingerprint", "data.seq_len", "optim.name")


# Keys of data.* that change neither documents nor token ids.
_AS_READ = ("seq_len", "packing", "too_long", "batching", "document_mask", "mix_until")


def resume_problems(
    saved: Mapping[str, Any], planned: Mapping[str, Any], allowed: list[str], run: str = "RUN"
) -> list[str]:
    """Return the problems that keep `planned` from resuming `saved`, both as in plan.json, of the
    folder `run`.

    Compares the run config, the precision family, the model, the data fingerprint, and the order of
    a mixture's sources, which data.mix_until may tie to the length of the run; of these, `planned`
    lacks what is not known before the data is read.
    """
    different = [
        (key, old, new)
        for key, old, new in _differences(saved, planned)
        if key not in (*allowed, *FREE_KEYS)
        if key in RECORDED_KEYS or key.partition(".")[0] not in FREE_SECTIONS
        if key != "model.attention" or not (_is_exact(old) and _is_exact(new))
    ]
    allow = ",".join(asked([*allowed, *(key for key, *_ in different)], planned))
    return _reshaped(saved, planned, run) or [
        f"{key} is {_short(new, old)}, but the run in this folder has {_short(old, new)}: "
        f"{_use(key, saved, planned)}, use another run.dir, or set resume.allow={allow} to change "
        "it on purpose"
        for key, old, new in different
    ]


def asked(keys: list[str], planned: Mapping[str, Any]) -> dict[str, None]:
    """Return keys that differ, and what a run will compare next if they do."""
    later = ["probe"] if {"model_config", "model.lora"} & {*keys} else []
    data = [key[5:] for key in keys if key.startswith("data.") and key[5:] not in _AS_READ]
    later += ["data_fingerprint"] if data else []
    later += ["data_mixture"] if any(key.startswith(("mix", "rehearse")) for key in data) else []
    return dict.fromkeys([*keys, *(key for key in later if key not in planned)])


def _reshaped(saved: Mapping[str, Any], planned: Mapping[str, Any], run: str) -> list[str]:
    """Return the problem of tensors with other names or shapes than the saved ones, which no
    resume.allow lets a checkpoint fill; none for unknown architectures and damaged records.
    """
    try:
        old, new = _tensors(saved), _tensors(planned)
    except (AttributeError, KeyError, TypeError, ValueError):
        return []
    different = [name for name in {**new, **old} if old.get(name) != new.get(name)]
    if not different:
        return []
    name, anew = different[0], "start anew in another run.dir"
    if all(n in old and n in new and old[n][1:] == new[n][1:] for n in different):  # only rows
        tool = script("tools/export_hf.py")
        export = f"model.init_from={run}/export (python {tool} {run} writes it)"
        anew = f"start from its export in another run.dir, {export}"
    keys = [key for key, *_ in _differences(saved, planned) if key.startswith("model")]
    now, was = (each.get(name, "missing") for each in (new, old))
    if name == _ADAPTERS:
        now, was = now[0], was[0]
    return [
        f"{name} is {now}, but that of the run is {was} ({', '.join(keys)}), and a checkpoint "
        f"keeps its shapes: keep the value, or {anew}"
    ]


_ADAPTERS = "model.lora"


def _tensors(plan: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the shape of every tensor by name, and what those of adapters depend on."""
    lora = plan["run"]["model"]["lora"]
    kept = ("rank", "targets", "modules_to_save", "dora")
    adapters = [f"{key}={lora[key]}" for key in kept if lora["rank"] and lora[key]]
    tensors = Shape.from_hf(plan["model_config"]).tensors()
    return {tensor.name: tensor.shape for tensor in tensors} | {
        _ADAPTERS: (", ".join(adapters) or "off",)
    }


def too_short(total_steps: int | None, newest: int) -> list[str]:
    """Return the problem of a run that ends before its newest checkpoint, if it does. None steps:
    unknown before the data is read.
    """
    if total_steps is None or newest <= total_steps:
        return []
    return [
        f"the run has {total_steps} steps, but its newest checkpoint is from step {newest}: raise "
        "train.steps to that or more, or remove later checkpoints"
    ]


def has_sections(plan: dict[str, Any]) -> bool:
    """Return True if the sections that a resume compares have the right types."""
    run, ds = plan.get("run"), plan.get("deepspeed", {})
    sections = [run, ds, *(run.values() if isinstance(run, dict) else ())]
    if not all(isinstance(section, dict) for section in sections):
        return False
    return isinstance(ds.get("bf16", {}), dict)


def branch_problems(
    saved: Mapping[str, Any], planned: Mapping[str, Any], allowed: list[str], run: str = "RUN"
) -> list[str]:
    """Return the problems that keep `planned` from branching off `saved`, of the folder `run`: a
    different model or data.
    """
    different = [d for d in _differences(saved, planned) if d[0] in {*BRANCH_KEEPS} - {*allowed}]
    allow = ",".join(asked([*allowed, *(key for key, *_ in different)], planned))
    return _reshaped(saved, planned, run) or [
        f"{key} is {_short(new, old)}, but that run has {_short(old, new)}: a branch must keep it, "
        f"unless resume.allow={allow} allows the change"
        for key, old, new in different
    ]


def changed_keys(saved: Mapping[str, Any], planned: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return all settings that a resumed run changes, for its record; the JSON's key is
    "deepspeed".
    """
    differences = [*_differences(saved, planned)]
    if saved.get("deepspeed") != planned.get("deepspeed"):
        differences.append(("deepspeed", saved.get("deepspeed"), planned.get("deepspeed")))
    return [{"key": key, "was": old, "value": new} for key, old, new in differences]


def _differences(
    saved: Mapping[str, Any], planned: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    for section, values in planned["run"].items():
        saved_values = saved["run"].get(section, {})
        if section == "own":  # not all keys are there
            values = {**dict.fromkeys(saved_values), **values}
            saved_values = {**dict.fromkeys(values), **saved_values}
        for name, new in values.items():
            key = f"{section}.{name}"
            if name in saved_values and key not in RECORDED_KEYS:
                old = saved_values[name]
                if old != new:
                    yield key, old, new
    for key in RECORDED_KEYS:
        old, new = _value(saved, key), _value(planned, key)
        if old != new and (key in planned or key == "run.code"):
            yield key, old, new


def recorded_run(sections: Mapping[str, Any]) -> RunConfig:
    """Return the run config of a plan.json. Raises ValueError if it is damaged."""
    completed = {name: {**values} for name, values in sections.items()}
    optim = completed.get("optim", {})
    for key, other in _EXCLUDE.items():  # a saved plan has all keys, including defaults
        if optim.get(key) is not None:
            optim.pop(other, None)
    return RunConfig.model_validate(completed, context=RECORDED)


def _is_exact(attention: str) -> bool:
    """Return True if an attention implementation is exact."""
    row = ATTENTIONS.get(attention)
    return row is None or row.is_exact


def _use(key: str, saved: Mapping[str, Any], planned: Mapping[str, Any]) -> str:
    """Return the first part of the suggested fix."""
    if key == "run.code":
        return "the code has changed (own_code-SHA.py is a copy): name the same file"
    if key != "data_fingerprint":
        return "keep its value"
    return (
        "documents, token ids or tokenizer have changed (for a .bin above 32 GiB, perhaps only its "
        f"modification time){_changed_pairs(saved, planned)}: restore the data"
    )


def _changed_pairs(saved: Mapping[str, Any], planned: Mapping[str, Any]) -> str:
    """Return which .bin/.idx pairs of a folder have changed, as text; "" if none."""
    before, now = (
        {
            f"{source}/{name}".lstrip("/"): tuple(counts)
            for source, pairs in plan.get("data", {}).get("pairs", {}).items()
            for name, *counts in pairs
        }
        for plan in (saved, planned)
    )
    kinds = {
        "removed": [name for name in before if name not in now],
        "new": [name for name in now if name not in before],
        "resized": [n for n in now if n in before and now[n] != before[n]],
    }
    texts = [
        f"{', '.join(names[:5])}{' and more' * (len(names) > 5)} {what}"
        for what, names in kinds.items()
        if names
    ]
    return f"; {'; '.join(texts)}" if texts else ""


def _value(plan: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key. A precision includes that of optimizer states that are not
    fp32.
    """
    if key == "run.code":
        code = plan.get("code")
        return code.get("sha256") if isinstance(code, Mapping) else code
    value = plan.get(key)
    halves = plan.get("deepspeed", {}).get("bf16", {}).get("bf16_optimizer_states")
    return f"{value} states" if key == "precision" and halves else value


def _short(value: Any, other: Any) -> str:
    """Return a value as short text; for two tables, only the entries that differ."""
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        value = {k: v for k, v in value.items() if k not in other or other[k] != v}
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
