"""Checks that the files of model.init_from are complete safetensors files, before opening them.

Only headers are read. transformers would open any file that an index names, even a pickle, and
would fail on a damaged file halfway through loading.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from harness.config.run_config import run_and_step
from harness.errors import Unusable
from harness.files.paths import user_path
from harness.files.regular_file import read_json
from harness.files.table import Table
from harness.files.tensor_header import read_header
from harness.plan.model_config import merge_first, preset_names
from harness.plan.plan import Draft

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "consolidated.00.pth")
_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")  # transformers' own
_MOST_INDEX_BYTES = 2**28  # enough for a million tensors
_DEQUANTIZED = ("fp8", "mxfp4")
"""Quantization methods whose weights transformers can dequantize on any device."""
_SHOWN = 3  # number of bad files to show
_CONVERT = (
    "if you trust it, convert it: AutoModelForCausalLM.from_pretrained(FOLDER)"
    ".save_pretrained(NEW_FOLDER)"
)


def weight_file_problems(source: str, named: object = None, opens: bool = False) -> list[str]:
    """Return the problems of the files that model.init_from names.

    Empty for a run of this harness, whose checkpoints have their own checks. `named`: the value of
    transformers_weights in the model's config, which replaces the usual file. `opens`: True if the
    files are opened next; a plan alone accepts a folder without weights and does not ask the hub
    for an index. Raises ConfigError if `source` is not a valid path.
    """
    folder = user_path("model.init_from", source)
    try:
        if has_checkpoints(source):
            return []
        if folder.is_dir():
            problems = _folder_problems(folder, named, opens)
        else:
            index = _hub_index(source) if opens else None
            problems = [] if index is None else _index_problems(index)[1]
    except (Unusable, OSError) as error:
        problems = [str(error)]
    return [f"model.init_from is {source!r}: {problem}" for problem in _shortened(problems)]


def refuses_preset(draft: Draft) -> bool:
    """Reject a preset and return True, unless the plan is made only for its estimate."""
    source = draft.config.model.init_from
    if source not in preset_names() or draft.estimating:
        return False
    draft.problems.add(
        "model.init_from",
        "which is a preset and has no weights",
        f"remove it for random weights of model.name={source}, or name a folder with weights",
    )
    return True


def has_checkpoints(source: str) -> bool:
    """Return True if model.init_from names a run of this harness."""
    checkpoints = run_and_step(source)[0] / "checkpoints"
    return checkpoints.is_dir() and any(checkpoints.glob("step-*"))


def check_quantization(draft: Draft) -> None:
    """Note weights that transformers dequantizes when it reads them; reject all other methods."""
    source, quantization = draft.config.model.init_from, draft.stored.get("quantization_config")
    if not quantization:
        return
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else "a list"
    if method in _DEQUANTIZED:
        draft.note(
            "dequantized",
            f"the weights of {source} are quantized ({method}): they are dequantized as they are "
            f"read, trained in {draft.precision}, and exported without quantization_config",
        )
    else:
        draft.problems.add(
            "model.init_from",
            f"whose weights are quantized by {method}, which cannot be trained",
            "set model.init_from to the unquantized weights "
            f"({' and '.join(_DEQUANTIZED)} are dequantized as they are read)",
        )


def _folder_problems(folder: Path, named: object, opens: bool) -> list[str]:
    names = sorted(path.name for path in folder.iterdir())
    if "adapter_config.json" in names:
        return [merge_first(folder)]
    if any(map(_DISTRIBUTED.fullmatch, names)):
        return [f"{folder} holds shards of a distributed save: rewrite it with save_pretrained"]
    file = next((name for name in (_WEIGHTS, _INDEX) if name in names), None)
    if named is not None:
        file = named if isinstance(named, str) else ""
        if not (_is_plain(file) and file.endswith((".safetensors", ".safetensors.index.json"))):
            return [
                f"its transformers_weights is {named!r:.60}, not a safetensors file in {folder}"
            ]
    if file is None:
        pickle = next((name for name in _PICKLES if name in names), None)
        why = f"; {pickle} is a pickle, which is never opened: {_CONVERT}" if pickle else ""
        missing = [f"{folder} holds neither {_WEIGHTS} nor {_INDEX}{why}"]
        return missing if opens or pickle else []
    files, problems = [folder / file], list[str]()
    if file.endswith(".index.json"):
        _require_inside(folder / file, folder)
        files, problems = _index_problems(folder / file)
    for path in files:
        try:
            _require_inside(path, folder)
            read_header(path, links=True)
        except FileNotFoundError:
            problems.append(f"{path} does not exist")
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror}")
        except Unusable as error:
            problems.append(str(error))
    return problems


def _index_problems(index: Path) -> tuple[list[Path], list[str]]:
    """Return the files beside an index that it names, and the problems of the index."""
    content = Table(read_json(index, _MOST_INDEX_BYTES, links=True), index)
    content.table("metadata")
    weight_map = content.table("weight_map")
    files = sorted({weight_map.text(name) for name in weight_map.values})
    if not files:
        return [], [f"{index} names no weights"]
    strange = [name for name in files if not (_is_plain(name) and name.endswith(".safetensors"))]
    problems = [
        f"{index} names {name!r:.60}, but there is no such safetensors file beside it"
        for name in strange
    ]
    return [index.parent / name for name in files if name not in strange], problems


def _is_plain(name: str) -> bool:
    """Return True if `name` is a file name without a folder."""
    return Path(name).name == name and "\0" not in name and "\\" not in name


def _require_inside(path: Path, folder: Path) -> None:
    """Raise Unusable for a link that leads out of its folder, except in the hub's cache."""
    # Unlike Path.resolve, this accepts a link to itself, which fails when the file is opened.
    base, target = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    blobs = base.parents[1] / "blobs" if base.parent.name == "snapshots" else base
    if not (target.is_relative_to(base) or target.is_relative_to(blobs)):
        raise Unusable(f"{path} is a link to {target}: put the file itself there")


def _hub_index(name: str) -> Path | None:
    """Return a hub model's index in the local cache; None if its weights are a single file."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    try:
        return Path(hf_hub_download(name, _INDEX, etag_timeout=5))
    except (EntryNotFoundError, HfHubHTTPError, HFValidationError, OSError):
        return None  # other problems are reported when its config is read


def _shortened(problems: list[str]) -> list[str]:
    more = len(problems) - _SHOWN
    return problems if more <= 0 else [*problems[:_SHOWN], f"and {more} more files like these"]
