"""Exports a checkpoint as a Hugging Face model and checks the loss of the export."""

import json
import logging
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.checkpoint.export import (
    ADAPTERS,
    SHARD_BYTES,
    Progress,
    adapted,
    base_of,
    merged,
    opened,
    replacing,
    rows_of_base,
    sweep,
    write_adapters,
    write_model,
)
from harness.checkpoint.hub_layout import rewrite_tokenizer_config, write_json
from harness.checkpoint.manifest import Checkpoint
from harness.checkpoint.reader import Reader
from harness.config.model_section import ModelConfig
from harness.config.sections import RECORDED, TrainConfig
from harness.data.tokenizer import load_tokenizer, read_otherwise
from harness.data.tokenizer_files import (
    GENERATION,
    SpecialIds,
    companions_of,
    copy_companions,
    copy_tokenizer,
)
from harness.errors import ConfigError, Unusable
from harness.files.paths import script
from harness.files.regular_file import read_json
from harness.files.table import Table
from harness.layout.adapters import DESCRIPTION
from harness.layout.attention_table import SIZES
from harness.layout.code_exports import ATTENTION
from harness.layout.recompute import REVERSIBLE
from harness.models.adapters import of_description, round_linear_maps
from harness.models.as_trained import attend_as_trained
from harness.models.attention import attend_with
from harness.models.efficient_attention.kinds import is_kind
from harness.models.export_code import opened_as_trained, write_code
from harness.models.initialize import add_rows, vocabulary_of
from harness.models.loss import forward
from harness.models.skeleton import DTYPES, hf_config, skeleton, tied_names
from harness.run.saving import PROBE_TOLERANCES, stored_probe, texts_of
from harness.runfolder import RunFolder

_MOST_GENERATION_BYTES = 2**24


class ExportDiffers(Exception):
    """The exported model differs from the saved one."""


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export.

    `dtype`: one of DTYPES; None for the run's precision. `merge`: write weights merged with the
    adapters, and the adapters in a subfolder. `source`: folder or hub id of the model, read only if
    custom code may run. `check`: compare the loss on the probe batch, on the CPU. `most_checked`:
    largest number of parameters to check; None for no limit.
    """

    dtype: str | None = None
    shard_bytes: int = SHARD_BYTES
    check: bool = True
    most_checked: int | None = None
    merge: bool = False
    source: str | None = None
    trust_remote_code: bool = False


def export(
    checkpoint: Checkpoint,
    folder: Path,
    tokenizer: Path,
    options: ExportOptions,
    progress: Progress = lambda done, total: None,
) -> str:
    """Export to `folder`, which appears only when complete; return notes and how it was checked.

    `tokenizer`: a folder whose files are copied if it exists; its special ids are set in the model.
    Not collective; needs neither GPU nor DeepSpeed. Raises ExportDiffers with both losses,
    ConfigError, and CannotSave if there is not enough space.
    """
    manifest = checkpoint.manifest
    dtype = options.dtype or manifest.precision
    attention = attention_of_run(checkpoint)
    removed = [f"removed {place}, left by a killed export" for place in sweep(folder)]
    if manifest.adapters:
        said = _export_adapters(checkpoint, folder, tokenizer, options, dtype, attention)
        return "; ".join([*removed, said])
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        config = hf_config(manifest.model_config, options.source, options.trust_remote_code)
        model = skeleton(config, DTYPES[dtype], "eager", options.trust_remote_code)
    except Exception as error:  # transformers raises errors of any kind for a bad config
        problem = f"its model cannot be built: {type(error).__name__}: {error}"
        raise ConfigError(f"{checkpoint.path}: {problem}") from error
    with replacing(folder) as unfinished:
        notes, generation = _put_tokenizer(tokenizer, unfinished, model, options)
        how = options.shard_bytes, progress, manifest.model_config
        notes += write_model(unfinished, model, Reader.of(checkpoint), *how)
        _write_generation(unfinished, generation)
        notes += _put_code(unfinished, model, attention, manifest.model_config)
        notes += _put_companions(tokenizer, unfinished)
        notes += _read_by_others(unfinished, options)

        def model_there() -> Any:
            own = opened_as_trained(unfinished, dtype=DTYPES[dtype], local_files_only=True)
            return own or opened(unfinished, DTYPES[dtype], options.trust_remote_code)

        notes.append(_checked(checkpoint, model_there, dtype, options))
        return "; ".join([*removed, *notes]) + _serving(checkpoint, folder, unfinished, False)


def attention_of_run(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the kind, sizes and seed of the attention that a checkpoint was trained with; {} for
    exact attention. Raises ConfigError if the run's plan.json is damaged.
    """
    folder = RunFolder(checkpoint.path.parents[1])
    run = (folder.read_plan() or {}).get("run", {})
    keys = ("attention", *(f"attention_{name}" for name in SIZES))
    try:
        own = {key: value for key, value in run.get("model", {}).items() if key in keys}
        model = ModelConfig.model_validate(own, context=RECORDED)
        if not model.attention_sizes:
            return {}
        seed = TrainConfig.model_validate({"seed": run["train"]["seed"]}).seed
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        why = f"does not say which attention was trained: {type(error).__name__}: {error}"
        raise ConfigError(f"{folder.plan_path} {why}") from error
    return {"kind": model.attention, "sizes": model.attention_sizes, "seed": seed}


def _put_code(
    folder: Path, model: Any, attention: dict[str, Any], model_config: Mapping[str, Any]
) -> list[str]:
    """Write a model's code if transformers alone would compute something else. Return notes."""
    is_reversible = bool(model_config.get(REVERSIBLE))
    if not attention and not is_reversible:
        return []
    write_code(folder, model, attention)
    kind = [f"{attention['kind']} attention"] if attention else []
    what = " and ".join([*kind, *["two streams"] * is_reversible])
    return [f"its code is included: trust_remote_code=True computes {what}, as in training"]


def _put_companions(tokenizer: Path, folder: Path) -> list[str]:
    """Copy the other files that came with the initial weights, if any. Return notes."""
    if not companions_of(tokenizer).is_dir():
        return []
    names = copy_companions(companions_of(tokenizer), folder)
    return [f"copied from the initial weights: {', '.join(names)}"] if names else []


def _export_adapters(
    checkpoint: Checkpoint,
    folder: Path,
    tokenizer: Path,
    options: ExportOptions,
    dtype: str,
    attention: dict[str, Any],
) -> str:
    """Export a run that trained adapters: only the adapters, or weights merged with them."""
    manifest = checkpoint.manifest
    with replacing(folder) as unfinished:
        within = unfinished / ADAPTERS if options.merge else unfinished
        within.mkdir(exist_ok=True)
        rows, tied = _new_rows(checkpoint, options.trust_remote_code), dict[str, str]()
        if manifest.adapters.get("modules_to_save"):
            code = options.source, options.trust_remote_code
            tied = tied_names(manifest.model_config, *code)

        def base_model() -> Any:
            base = base_of(checkpoint, DTYPES[dtype], options.trust_remote_code)
            add_rows(base, rows)
            return base

        beside = vocabulary_of(base_model()) if rows else {}
        write_adapters(checkpoint, within, DTYPES[dtype], tied, beside)
        if attention:
            write_json(within / f"{ATTENTION}.json", attention)

        def model() -> Any:
            base = base_model()
            if manifest.quantization:  # the adapters were trained on quantized weights
                quantization = of_description(manifest.quantization)
                round_linear_maps(base, quantization, DTYPES[manifest.precision])
            if attention:
                attend_as_trained(base, attention)
            return adapted(within, base)

        if options.merge:
            apart = model()
            notes, generation = _put_tokenizer(
                tokenizer, unfinished, apart.get_base_model(), options
            )
            whole = merged(apart, unfinished)
            _write_generation(unfinished, generation)
            notes += _put_code(unfinished, whole, attention, manifest.model_config)
            notes += _put_companions(tokenizer, unfinished)
            notes += _read_by_others(unfinished, options)
            notes.append(_checked(checkpoint, lambda: whole, dtype, options))
            return "; ".join(notes) + _serving(checkpoint, folder, unfinished, False)
        if tokenizer.is_dir():
            _copy_tokenizer(tokenizer, unfinished, options)
        base = manifest.adapters["base_model_name_or_path"]
        how = f" with linear layers quantized as in {DESCRIPTION}"
        quantized = how if manifest.quantization else ""
        first = f", after resize_token_embeddings({rows})" if rows else ""
        kind = f", with {attention['kind']} attention" if attention else ""
        checked = _checked(checkpoint, model, dtype, options)
        serving = _serving(checkpoint, folder, unfinished, bool(rows or attention))
        return f"adapters of {base}{quantized}{first}{kind}; {checked}{serving}"


_MOST_RANK = 512
"""vLLM's largest --max-lora-rank; all are powers of two."""


def _serving(checkpoint: Checkpoint, folder: Path, unfinished: Path, other_base: bool) -> str:
    """Return how to serve an export with vLLM, once it is in `folder`, if need be merged;
    `other_base`: its adapters were trained on another model than that of the files.
    """
    manifest, adapters = checkpoint.manifest, checkpoint.manifest.adapters
    if (config := unfinished / "config.json").is_file():
        own = "auto_map" in json.loads(config.read_text(encoding="utf-8"))
        return "" if own else f"; serve it with vllm serve {shlex.quote(str(folder))}"
    most = max(8, 1 << (adapters["r"] - 1).bit_length())
    kinds = (adapters.get("use_dora"), adapters.get("modules_to_save"), manifest.quantization)
    if most > _MOST_RANK or other_base or any(kinds):
        run = shlex.quote(str(checkpoint.path.parents[1]))
        tool = script("tools/export_hf.py")
        return f"; to serve it, merge it first: python {tool} {run} --merge"
    base, module = adapters["base_model_name_or_path"], f"tuned={folder.absolute()}"
    options = ["--enable-lora", "--max-lora-rank", str(most), "--lora-modules", module]
    return f"; serve it with {shlex.join(['vllm', 'serve', base, *options])}"


def _new_rows(checkpoint: Checkpoint, trust_remote_code: bool) -> int | None:
    """Return the vocabulary size of a run with adapters if its base model's is smaller."""
    rows = checkpoint.manifest.model_config.get("vocab_size")
    own = rows_of_base(checkpoint, trust_remote_code)
    return rows if isinstance(rows, int) and own is not None and rows > own else None


def _put_tokenizer(
    source: Path, folder: Path, model: Any, options: ExportOptions
) -> tuple[list[str], dict[str, Any] | None]:
    """Copy a tokenizer to `folder` and set its special ids in the model's configs. Return notes,
    and the generation_config.json of the initial weights, if any.
    """
    if not source.is_dir():
        return [], None
    notes, tokenizer = _copy_tokenizer(source, folder, options)
    if tokenizer is None:
        return notes, None
    ids = SpecialIds.of(tokenizer)
    return [*notes, *_set_special_ids(model, ids)], _generation(folder, ids)


def _copy_tokenizer(source: Path, folder: Path, options: ExportOptions) -> tuple[list[str], Any]:
    """Copy a tokenizer to `folder`, readable by both transformers versions. Return notes and the
    tokenizer; None if it cannot be loaded, which does not prevent exporting the weights.
    """
    skipped = copy_tokenizer(source, folder, options.trust_remote_code)
    notes = [f"not copied from {source}: {', '.join(skipped)}"] if skipped else []
    try:
        tokenizer = load_tokenizer(folder, trust_remote_code=options.trust_remote_code)
    except ConfigError as error:
        return [*notes, f"special ids are those of the model config, because {error}"], None
    rewrite_tokenizer_config(folder, tokenizer)
    return notes, tokenizer


def _read_by_others(folder: Path, options: ExportOptions) -> list[str]:
    """Return a note if programs that use AutoTokenizer would read another tokenizer."""
    try:
        kind = read_otherwise(folder, trust_remote_code=options.trust_remote_code)
    except Exception:  # without a tokenizer, or one that cannot be loaded, which is noted already
        return []
    how = "open it with PreTrainedTokenizerFast"
    return [f"AutoTokenizer reads its tokenizer as {kind}, with other ids: {how}"] if kind else []


def _set_special_ids(model: Any, ids: SpecialIds) -> list[str]:
    """Set a tokenizer's ids in the model's configs; return a note about those that changed."""
    before = model.config.to_dict()
    after = ids.in_place_of(before)
    for name, value in after.items():
        setattr(model.config, name, value)
        if model.generation_config is not None:
            setattr(model.generation_config, name, value)
    changed = [f"{n} {after[n]} (was {before.get(n)})" for n in after if after[n] != before.get(n)]
    return [f"special ids are set to the tokenizer's: {', '.join(changed)}"] if changed else []


def _generation(folder: Path, ids: SpecialIds) -> dict[str, Any] | None:
    """Return the initial weights' generation_config.json, if any, with the tokenizer's ids."""
    path = folder / GENERATION
    if not path.exists():
        return None
    try:
        stored = Table(read_json(path, _MOST_GENERATION_BYTES), GENERATION).as_json()
    except Unusable as error:
        raise ConfigError(f"beside the tokenizer: {error}") from error
    return {**stored, **ids.in_place_of(stored)}


def _write_generation(folder: Path, generation: dict[str, Any] | None) -> None:
    """Write generation_config.json over the one written with the model."""
    if generation is not None:
        write_json(folder / GENERATION, generation)


def _checked(
    checkpoint: Checkpoint, model: Callable[[], Any], dtype: str, options: ExportOptions
) -> str:
    """Return the result of comparing the loss of `model` with the checkpoint's, as text."""
    expected, limit = checkpoint.manifest.probe_loss, options.most_checked
    if not options.check:
        return "its loss was not checked: not requested"
    if expected is None:
        return "its loss was not checked: the checkpoint has no probe"
    if limit is not None and _parameters(checkpoint, options) > limit:
        return f"its loss was not checked: it has more than {limit:,} parameters"
    exported = model().eval()
    loss = _loss(checkpoint, exported)
    tolerance = max(PROBE_TOLERANCES[dtype], PROBE_TOLERANCES[checkpoint.manifest.precision])
    same = math.isclose(loss, expected, rel_tol=tolerance)
    own = _own_attention(checkpoint)
    if not (same or own or (math.isnan(loss) and math.isnan(expected))):
        raise ExportDiffers(
            f"{checkpoint.path} was saved with a loss of {expected:.7g} on its probe batch, but "
            f"the exported model has {loss:.7g} (relative tolerance {tolerance:g}): not exported"
        )
    exact = ""
    if is_kind(exported.config._attn_implementation):
        attend_with("eager", exported)
        exact = f"; with exact attention it would be {_loss(checkpoint, exported):.6g}"
    within = f" (equal within {100 * tolerance:g} %)" if same else ""
    exact += f"; exports lack the attention {own} of run.code" * bool(own)
    return f"its probe loss is {loss:.6g}, and was {expected:.6g} in training{within}{exact}"


def _own_attention(checkpoint: Checkpoint) -> str:
    """Return the attention that a run took from its run.code; "" if there is none."""
    plan = RunFolder(checkpoint.path.parents[1]).read_plan() or {}
    name = str(plan.get("run", {}).get("model", {}).get("attention"))
    return name if f"attention {name}" in (plan.get("code") or {}).get("adds", ()) else ""


def _parameters(checkpoint: Checkpoint, options: ExportOptions) -> int:
    """Return the number of parameters of a checkpoint's model, including frozen ones."""
    how = options.source, options.trust_remote_code
    config = hf_config(checkpoint.manifest.model_config, *how)
    model = skeleton(config, DTYPES["fp32"], "eager", options.trust_remote_code)
    return int(model.num_parameters())


@torch.no_grad()
def _loss(checkpoint: Checkpoint, model: Any) -> float:
    """Return the mean loss in nats over the probe's targets, computed one text at a time."""
    probe = stored_probe(checkpoint)
    texts = ((text.input_ids, text.labels, text.position_ids) for text in texts_of(probe))
    total = sum(forward(model, *text)[0].item() for text in texts)
    return total / int((probe.labels != -100).sum())
