"""Checks that the files of model.init_from are whole, and that their tensors are the model's.

Only headers are read. transformers would open any file that an index names, even a pickle, and
would fail on a damaged file halfway through loading. Tensors are named as in transformers' models;
a layer's experts, which files divide, count as one.
"""

import contextlib
import json
import mmap
import os
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from harness.config.assignments import listed
from harness.config.run_config import RunConfig, run_and_step
from harness.errors import Unusable
from harness.files.paths import user_path
from harness.files.regular_file import read_json
from harness.files.table import Table
from harness.files.tensor_header import StoredTensor, read_header
from harness.layout.families import SIZE_KEYS, family_of
from harness.layout.recompute import REVERSIBLE
from harness.layout.shape import Shape
from harness.plan.model_config import merge_first, preset_names, published_weights
from harness.plan.plan import Draft

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "consolidated.00.pth")
_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")  # transformers' own
_MOST_INDEX_BYTES = 2**28  # enough for a million tensors
_DEQUANTIZED = ("fp8", "mxfp4")
"""Quantization methods whose weights transformers can dequantize on any device."""
_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_NAMES = {kind: re.compile(pattern) for kind, pattern in _TABLE["names"].items()}
_TIED, _ROWS, _HEAD = "tie_word_embeddings", "vocab_size", "lm_head.weight"
Tensors = dict[str, tuple[Path, StoredTensor]]
Shapes = dict[str, tuple[int, ...]]
_SHOWN = 3  # number of bad files to show
_CONVERT = (
    "if you trust it, convert it: AutoModelForCausalLM.from_pretrained(FOLDER)"
    ".save_pretrained(NEW_FOLDER)"
)


def weight_file_problems(
    source: str, named: object = None, opens: bool = False, tensors: Tensors | None = None
) -> list[str]:
    """Return the problems of the files that model.init_from names.

    Empty for a run of this harness, whose checkpoints have their own checks. `named`: the value of
    transformers_weights in the model's config, which replaces the usual file. `opens`: True if the
    files are opened next; a plan alone accepts a folder without weights and does not ask the hub
    for an index. `tensors` receives those of the files. Raises ConfigError if `source` is not a
    valid path.
    """
    folder = user_path("model.init_from", source)
    try:
        if has_checkpoints(source):
            return []
        if folder.is_dir():
            problems = _folder_problems(folder, named, opens, {} if tensors is None else tensors)
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
    weights = published_weights(str(source)) or "a folder with weights"
    draft.problems.add(
        "model.init_from",
        "which is a preset and has no weights",
        f"remove it for random weights of model.name={source}, or name {weights}",
    )
    return True


def has_checkpoints(source: str) -> bool:
    """Return True if RUN or RUN@STEP names a folder that holds checkpoints."""
    checkpoints = run_and_step(source)[0] / "checkpoints"
    return source != "" and checkpoints.is_dir() and any(checkpoints.glob("step-*"))


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


def check_vocabulary(draft: Draft, tensors: Tensors) -> None:
    """Take the number of vocabulary rows from the files. Reject a config.json with another number,
    unless the run sets it, and a tied head whose values are not the embedding's.
    """
    model, config, named = draft.config.model, draft.model_config, draft.stored.get(_ROWS)
    embedding, head = (_only(kind, tensors) for kind in ("embedding", "head"))
    if embedding and named and embedding[1].numel and (rows := embedding[1].shape[0]) != named:
        draft.stored[_ROWS] = rows
        if model.name == model.init_from and _ROWS not in model.overrides:
            why = f"whose config.json says {_ROWS} {named}, but whose weights have {rows} rows"
            draft.problems.add("model.init_from", why, f"set model.overrides.{_ROWS}={rows}")
            draft.model_config = {**config, _ROWS: rows}
    tied = config.get(_TIED, family_of(config["model_type"]).tied)
    if tied and embedding and head and _bytes(*embedding) != _bytes(*head):
        why = f"whose {_HEAD} differs from the embedding, but {_TIED} makes them one"
        draft.problems.add("model.init_from", why, f"set model.overrides.{_TIED}=false")


def check_tensors(draft: Draft, config: Mapping[str, Any], tensors: Tensors) -> None:
    """Reject weights whose names or shapes differ from this model's; note those that it ignores.
    `config`: the config.json of the weights, which stands for files that are elsewhere.
    """
    source, rows, model = (
        draft.config.model.init_from or "",
        draft.stored.get(_ROWS),
        draft.model_config,
    )
    if config.get(REVERSIBLE) != model.get(REVERSIBLE):
        draft.problems.add(
            "model.reversible",
            f"but {source} was trained with another setting",
            "train a reversible model from random weights, or from those of a reversible run",
        )
    if isinstance(rows, int) and rows < model[_ROWS]:
        model = {**model, _ROWS: rows}  # it grows when it is read
    needed, of_config = _of_config(model), _of_config(config)
    base = Shape.from_hf(model).body.layer_prefix.partition(".")[0] + "."
    files = _shapes((name, tensor.shape) for name, (_, tensor) in tensors.items()) or of_config
    stored: Shapes = {}
    for name, shape in files.items():  # transformers adds or removes the name of the base model
        forms = name, name.removeprefix(base), base + name
        stored[next((form for form in forms if form in needed), name)] = shape
    if tensors and _HEAD in stored and _HEAD not in needed:
        stored.setdefault(next(iter(needed)), stored[_HEAD])  # either may hold the tied weight
    if not has_checkpoints(source) and not (tensors and _HEAD in needed):
        for names in (needed, of_config, stored):  # tied, or the config alone names it
            names.pop(_HEAD, None)
    different = [name for name in needed if needed[name] != stored.get(name)]
    different += [name for name in of_config if name in stored and name not in needed]
    unused = sorted(n for n in stored if n not in needed and not _NAMES["computed"].search(n))
    if different:
        name, shapes = different[0], (stored, _of_config(draft.model_config))
        size, own = (each.get(name, "missing") for each in shapes)
        why = f"whose {name} is {size}, but {draft.config.model.name}'s is {own}"
        use = _way_out(draft.config, [*tensors], model, needed, of_config, stored)
        draft.problems.add("model.init_from", why, use)
    elif unused:
        why = f"{source} has weights that the model does not use: {', '.join(unused[:5])}"
        draft.events.append({"kind": "unused_weights", "message": why, "names": unused})


def _way_out(run: RunConfig, names: list[str], model: Mapping[str, Any], *shapes: Shapes) -> str:
    """Return advice on how to make the model match its pretrained weights. `names`: those in the
    files; `shapes`: those that the model needs, those of config.json, and those stored.
    """
    source, (needed, of_config, stored) = run.model.init_from or "", shapes
    if (run.model.overrides or run.model.name != source) and of_config.items() <= stored.items():
        sizes = {key for keys in SIZE_KEYS.values() for key in keys}
        overrides = [key for key in run.model.overrides if key in sizes] or [*run.model.overrides]
        named = " and ".join(f"model.overrides.{key}" for key in overrides)
        if run.model.name == source:
            return f"remove {named}"
        return f"set model.name={source}{f' without {named}' if named else ''}"
    embedding = next(iter(needed))
    prefix = next((n for n in names if n.endswith(f".{embedding}")), "").removesuffix(embedding)
    if prefix and all(name.startswith(prefix) for name in names):
        command = _command("rename", user_path("", source)).replace("PREFIX", json.dumps(prefix))
        return f"rename its tensors, without {prefix}, with {command}, and name RENAMED instead"
    layers = [re.match(r"[a-z_.]+\.(\d+)\.", name) for name in stored]
    number = max((int(match[1]) + 1 for match in layers if match), default=0)
    family = family_of(model["model_type"])
    tries = {family.size_keys("layers")[0]: number, _TIED: True}
    tries |= {flag: not model.get(flag, default) for flag, default in family.flags.items()}
    for key, value in tries.items():
        with contextlib.suppress(ValueError):
            if _of_config({**model, key: value}).items() <= stored.items():
                setting = f"model.overrides.{key}={json.dumps(value)}"
                return f"if these are all its weights, set {setting}"
    return "copy its config.json and weights again, from one model"


def _of_config(config: Mapping[str, Any]) -> Shapes:
    return _shapes((tensor.name, tensor.shape) for tensor in Shape.from_hf(config).tensors())


def _shapes(tensors: Iterable[tuple[str, tuple[int, ...]]]) -> Shapes:
    """Return shapes by name; of a layer's experts, their total number of elements."""
    shapes: Shapes = {}
    for name, shape in tensors:
        name = name.replace(".block_sparse_moe.", ".mlp.").replace("embed_out.", "lm_head.")
        if match := _NAMES["expert"].match(name):
            name, shape = match[1], (prod(shape) + shapes.get(match[1], (0,))[0],)
        shapes[name] = shape
    return shapes


def _command(name: str, folder: object) -> str:
    code = _TABLE["commands"][name].replace("FOLDER", json.dumps(str(folder)))
    return f"python -c {shlex.quote(code)}"


def _only(kind: str, tensors: Tensors) -> tuple[Path, StoredTensor] | None:
    places = [place for name, place in tensors.items() if _NAMES[kind].search(name)]
    return places[0] if len(places) == 1 else None


def _bytes(path: Path, tensor: StoredTensor) -> memoryview:
    with path.open("rb") as file:
        whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return memoryview(whole)[tensor.start : tensor.end]


def _folder_problems(folder: Path, named: object, opens: bool, tensors: Tensors) -> list[str]:
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
    elif file == _WEIGHTS and _INDEX in names:
        shards = [path.name for path in _index_problems(folder / _INDEX)[0]]
        if file not in shards and {*shards} & {*names}:
            return [
                f"{folder} holds {_WEIGHTS} and, in {_INDEX}, {shards[0]}, of which only the first "
                "is read: delete the files that are not meant"
            ]
    if file is None and (shards := [name for name in names if name.endswith(".safetensors")]):
        return [
            f"{folder} holds {listed(shards)}, but no {_INDEX} that names them: copy it, too, or "
            f"write it, if no shard is missing, with {_command('index', folder)}"
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
            header = read_header(path, links=True)
            tensors |= {name: (path, tensor) for name, tensor in header.items()}
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
