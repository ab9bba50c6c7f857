"""Invalid data, tokenizers, weights, caches, runs, checkpoints and pickles, each in a new
process.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import hashlib
import io
import json
import lzma
import os
import pickle
import random
import shutil
import struct
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from harness.errors import ConfigError, Unusable
from harness.files.records import read_lines, read_object
from harness.files.regular_file import read_json
from harness.files.tensor_header import read_header
from tests.inputs.rule import MANY, Case, Inputs, Place, each, remove
from tests.inputs.test_configs import TURNS, draw_word
from tests.inputs.values import (
    HOSTILE,
    LFS_POINTER,
    Draw,
    changed,
    damaged,
    draw_slot,
    encoded,
    pick,
    replace_file,
    spoil_file,
    to_json,
    write_json,
)
from tests.real_runs import REPOSITORY

_PATHS = (
    *("nowhere", "", ".", "..", "/dev/null", "/dev/null/x", "/dev/zero", "/dev/full", "s" * 300),
    *("~nosuchuser/x", "a/" * 3000, "*.txt", "\udcff", "a\nb", "https://x/y.jsonl", "-", "/sys/x"),
    *("/proc/self/mem", "/proc/self/fd/0", "/proc/self/fdinfo", "secret.txt", "secret.txt/x"),
)
_WORDS = "the model reads a text and learns which word follows another".split()  # noqa: SIM905
_RANDOM = random.Random(0)
_TEXTS = [
    " ".join(_RANDOM.choices(_WORDS, k=_RANDOM.randrange(40, 120))) + ".\n" for _ in range(30)
]
_RECORDS: dict[str, list[Any]] = {
    "texts": [{"text": text} for text in _TEXTS],
    "prompts": [{"prompt": text[:40], "completion": text} for text in _TEXTS],
    "chats": [{"messages": TURNS, "tools": [{"name": "add"}]}] * 30,
}


def _lines(draw: Draw[Any], place: Place, valid: bool) -> tuple[Path, str]:
    """Write records as JSON lines or an array; one is changed, or the file is spoiled."""
    name = pick(draw, _RECORDS)
    path = place.folder / pick(draw, ("lines.jsonl", "lines.jsonl", "lines.json"))
    texts, note = [to_json(record, indent=None) for record in _RECORDS[name]], "valid"
    if not valid:
        note = pick(draw, ("changed", "changed", "a value", "a line", "a file"))
    if note == "changed":
        texts[7] = to_json(draw(changed(_RECORDS[name][7])), indent=None)
    elif note == "a value":
        record = json.loads(texts[7])
        holder, key = draw_slot(draw, record)
        long = st.sampled_from(("word " * 400_000, "a\ud800", "\ud800", "</s><s><unk>" * 500))
        holder[key] = draw(pick(draw, (long, HOSTILE)))
        texts[7] = to_json(record, indent=None)
    elif note == "a line":
        texts[7] = pick(draw, ("", "{", "null", "[]", "1", '"a"', "{}", to_json(draw(HOSTILE))))
    text = f"[{','.join(texts)}]" if path.suffix == ".json" else "\n".join(texts)
    path.write_bytes(encoded(text))
    if note == "a file":
        note = spoil_file(draw, path)
    return path, f"{name}: {note}"


def _texts(draw: Draw[Any], place: Place, valid: bool) -> tuple[Path, str]:
    """Write a folder of texts; one or all of them are spoiled."""
    folder = place.folder / "texts"
    folder.mkdir()
    for number, text in enumerate(_TEXTS[:20]):
        (folder / f"{number}.txt").write_text(text)
    if valid:
        return folder, "valid"
    target, text = folder / "7.txt", _TEXTS[7] + "ü"
    codec = pick(draw, ("utf-8-sig", "utf-16", "utf-32", "latin-1", "shift-jis", "utf-7"))
    suffix = pick(draw, (".json", ".ndjson", ".JSONL", ".csv", ".md", ".py", ".txt.gz", "",
                         ".jsonl.zst", ".parquet"))  # fmt: skip
    link = pick(draw, (".", "..", "7.txt", "nowhere", "/dev/zero"))

    def nest() -> None:
        inner = folder.joinpath(*"abcdefgh" * 20)
        inner.mkdir(parents=True)
        (inner / "x.txt").write_text(text)

    changes: dict[str, Callable[[], object]] = {
        "spoiled": lambda: spoil_file(draw, target),
        "damaged": lambda: target.write_bytes(draw(damaged(encoded(text)))),
        codec: lambda: target.write_bytes(text.encode(codec, "ignore")),
        f"suffix {suffix}": lambda: [x.rename(x.with_suffix(suffix)) for x in [*folder.iterdir()]],
        f"a link to {link}": lambda: (folder / "link.txt").symlink_to(link),
        "NUL": lambda: target.write_bytes(bytes(100_000)),
        "without blanks": lambda: target.write_text("x" * 1_000_000),
        "all empty": lambda: [x.write_text(pick(draw, ("", "."))) for x in folder.iterdir()],
        "a picture": lambda: (folder / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(99)),
        "surrogates": lambda: target.write_bytes(encoded(text) + b"\xed\xa0\x80"),
        "strange names": lambda: (folder / "\udcff\n\u202e.txt").write_text(text),
        "hidden": lambda: [x.rename(folder / f".{x.name}") for x in [*folder.iterdir()]],
        "nested": nest,
        "no files": lambda: (shutil.rmtree(folder), folder.mkdir()),
        "one document": lambda: (shutil.rmtree(folder), folder.write_text(text)),
        "special tokens": lambda: target.write_text("</s><s><unk>" * 500),
    }
    note: str = pick(draw, changes)
    changes[note]()
    return folder, note


def _table(draw: Draw[Any], place: Place, valid: bool) -> tuple[Path, str]:
    """Write a table, compressed lines or another container, damaged or with a wrong name."""
    import pyarrow
    from pyarrow import parquet

    lines = "".join(json.dumps({"text": text}) + "\n" for text in _TEXTS).encode()
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table({"text": _TEXTS}), sink, row_group_size=7)
    readable = {
        ".jsonl.gz": gzip.compress(lines, mtime=0),
        ".jsonl.zst": bytes(pyarrow.Codec("zstd").compress(lines)),
        ".parquet": bytes(sink.getvalue()),
        ".csv": "\n".join(["text", *(f'"{text}"' for text in _TEXTS)]).encode(),
        ".tsv": "\n".join(["text\tid", *(f"{text.strip()}\t1" for text in _TEXTS)]).encode(),
    }
    others = {
        ".jsonl.bz2": bz2.compress(lines),
        ".jsonl.xz": lzma.compress(lines),
        ".arrow": b"ARROW1\0\0" + bytes(200),
        ".npy": b"\x93NUMPY\x01\x00" + bytes(200),
        ".pt": b"\x80\x02cposix\nmkdir\nq\x00X\x08\x00\x00\x00executedq\x01\x85q\x02Rq\x03.",
        ".tar": b"lines.jsonl".ljust(512, b"\0") + lines,
    }
    suffix = pick(draw, readable if valid else (*readable, *readable, *others))
    path, data, note = place.folder / f"data{suffix}", (readable | others)[suffix], "valid"
    if not valid and suffix in readable:
        note, data = "damaged", draw(damaged(data))
    if not valid and pick(draw, (True, False, False)):
        path = path.with_name(pick(draw, ("data.jsonl", "data.parquet", "data.csv", "data.txt")))
    path.write_bytes(data)
    return path, f"{suffix} as {path.name}: {note}"


def _pair(draw: Draw[Any], place: Place, valid: bool) -> tuple[Path, str]:
    """Copy a .bin/.idx pair; one of the files is spoiled."""
    tokens = place.base.tokens
    ids, index = (place.copied(Path(f"{tokens}{suffix}")) for suffix in (".bin", ".idx"))
    prefix = place.folder / tokens.name
    note = "valid" if valid else pick(draw, ("ids", "index", "index", "number", "rows", "half"))
    if note == "valid":
        return pick(draw, (prefix, ids, index)), note
    if note in ("ids", "index"):
        note = spoil_file(draw, ids if note == "ids" else index)
    elif note == "number":  # the version is in 8 bytes from 9 on, the counts start at 18
        data = index.read_bytes()
        at = pick(draw, (9, 17, 18, 26, *range(34, len(data) - 8, 4)))
        size = pick(draw, (1, 4, 8))
        number = draw(st.integers(0, 256**size - 1) | st.integers(0, 3))
        index.write_bytes(data[:at] + number.to_bytes(size, "little") + data[at + size :])
    elif note == "rows":  # ids that no tokenizer has
        data = bytearray(ids.read_bytes())
        for _ in range(pick(draw, (1, 1, 50))):
            at = draw(st.integers(0, len(data) // 2 - 1)) * 2
            data[at : at + 2] = struct.pack("<H", pick(draw, (511, 512, 600, 65_535)))
        ids.write_bytes(data)
    else:
        os.link(ids, place.folder / "other.bin")
        prefix = place.folder / pick(draw, ("other", "other.bin", "other.idx"))
    return prefix, note


_SHAPES = {"lines": _lines, "texts": _texts, "table": _table, "pair": _pair}


def data(draw: Draw[Any], place: Place, valid: bool) -> Case:
    """Train for a step on text, records, tables, a folder, a .bin/.idx pair or a path."""
    shape = pick(draw, _SHAPES if valid else (*_SHAPES, "lines", "path"))
    place.secret()
    path, note = pick(draw, _PATHS), "a path"
    if shape in _SHAPES:
        path, note = _SHAPES[shape](draw, place, valid)
    argv = [f"data.path={path}", f"data.tokenizer={place.base.tokenizer}", "data.held_out=0.2"]
    if "chats" in note:  # learn valid ones completely: their answers may begin beyond a sample
        learn = "all" if valid else pick(draw, ("all", "last", "assistant"))
        argv += ["data.template=chatml", f"data.learn={learn}"]
    return Case([*place.training(data=False), *argv], f"{shape}: {note} {path}", valid=valid)


def tokenizer(draw: Draw[Any], place: Place, valid: bool) -> Case:
    """Train for a step with the base's tokenizer, in which something is spoiled."""
    folder, note = place.copied(place.base.tokenizer), "valid"
    if not valid:
        note = pick(draw, ("a file", "a file", "shallow", "code", "vocabulary"))
    if note == "a file":
        note = spoil_file(draw, pick(draw, sorted(folder.glob("*.json"))))
    elif note != "valid":
        name = "tokenizer_config.json" if note == "code" else "tokenizer.json"
        tree = json.loads((folder / name).read_text())
        vocabulary, merges = tree.get("model", {}).get("vocab"), tree.get("model", {}).get("merges")
        if note == "shallow":
            rest = draw(changed({key: tree[key] for key in tree if key != "model"}))
            tree = {**tree, **rest} if isinstance(rest, dict) else rest
        elif note == "code":  # its own, and a template that would execute something
            place.plant_code(folder)
            tree |= {
                "tokenizer_class": pick(draw, ("XTokenizer", "PreTrainedTokenizerFast", "Nothing")),
                "auto_map": {"AutoTokenizer": ["tokenization_x.XTokenizer", None]},
                "chat_template": "{{ cycler.__init__.__globals__.os.popen('touch executed') }}",
            }
        elif draw(st.booleans()):
            word = pick(draw, ("</s>", "<s>", *list(vocabulary)[:40]))
            values = (-1, 10**6, 2**31, 2**63, "x", None, vocabulary["</s>"])
            vocabulary[word] = pick(draw, values)
        else:
            words = pick(draw, ((), ("</s>",), [*vocabulary]))
            for word in words:
                del vocabulary[word]
            merges[0] = pick(draw, (merges[0], ["x", "yy"], "a b c", [], None, 1))
        write_json(folder / name, tree)
    return Case(place.training("data.tokenizer=tokenizer"), note, valid=valid)


def weights(draw: Draw[Any], place: Place, valid: bool) -> Case:
    """Use an export of the base's run, whole or in shards, in which something is spoiled."""
    is_sharded = draw(st.booleans())
    folder = place.copied(place.base.sharded if is_sharded else place.base.export, "model")
    note, source = "valid", "model"
    if not valid:
        ways = ("weights", "weights", "no file", "json", "names", "pickle", "path", "pointers")
        note = pick(draw, ways)
    files = sorted(folder.glob("*.safetensors"))
    if note == "weights":
        note = spoil_file(draw, pick(draw, files))
    elif note == "no file":
        note = replace_file(draw, pick(draw, files))
    elif note == "json":
        note = spoil_file(draw, pick(draw, sorted(folder.glob("*.json"))))
    elif note == "names":
        note = _spoil_weight_map(draw, place, folder, files[0])
    elif note == "pickle":
        note = _plant_pickle(draw, place, folder)
    elif note == "pointers":  # a clone without git-lfs
        for path in files:
            path.write_bytes(LFS_POINTER)
    elif note == "path":
        source = pick(draw, (*_PATHS, "model/config.json", "run@1", "model@3"))
    argv = [*place.training(model=False), "model.name=model", f"model.init_from={source}"]
    return Case(argv, f"{'sharded' if is_sharded else 'one file'}: {note}", valid=valid)


def _spoil_weight_map(draw: Draw[Any], place: Place, folder: Path, shard: Path) -> str:
    """Write an index whose names lead elsewhere, or link a shard to an outside file."""
    place.secret()
    outside = place.folder / "outside.safetensors"
    shutil.copy(shard, outside)
    path = folder / "model.safetensors.index.json"
    index = (
        json.loads(path.read_text()) if path.exists() else {"weight_map": {"lm_head.weight": ""}}
    )
    names = [*index["weight_map"]]
    (folder / "w.bin").write_bytes(b"\x80\x02].")
    name = draw(
        st.sampled_from(("w.bin", "../outside.safetensors", str(outside), "../secret.txt", ".",
                         "model-00009-of-00009.safetensors", path.name, shard.name, "a link"))
        | HOSTILE
    )  # fmt: skip
    if name == "a link":
        shard.unlink()
        shard.symlink_to(pick(draw, (outside, shard.name, "../secret.txt")))
    else:
        some = pick(draw, (names, names[:1], ["model.layers.9.x"]))
        index["weight_map"] |= dict.fromkeys(some, name)
        write_json(path, index)
    return f"the index names {name!r:.60}"


def _plant_pickle(draw: Draw[Any], place: Place, folder: Path) -> str:
    """Put a pickle with a payload where a loader might look for weights."""
    for path in folder.glob("*.safetensors*"):
        if draw(st.booleans()):
            path.unlink()
    names = ("pytorch_model.bin", "model.bin", "model.safetensors", "adapter_model.bin")
    name = pick(draw, names)
    (folder / name).write_bytes(f"cposix\nmkdir\n(V{place.marker}\ntR.".encode())
    if draw(st.booleans()):
        index = pick(draw, ("model.safetensors.index.json", "pytorch_model.bin.index.json"))
        write_json(folder / index, {"metadata": {}, "weight_map": {"lm_head.weight": name}})
    if draw(st.booleans()):
        place.plant_code(folder)
        config = json.loads((folder / "config.json").read_text())
        config["auto_map"] = {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}
        write_json(folder / "config.json", config)
    return f"a pickle as {name}"


def cache(draw: Draw[Any], place: Place, valid: bool) -> Case:
    """Use the base's cache with a spoiled file, or another location for it."""
    argv, folder, note = place.training(), place.folder / "cache", "valid"
    if not valid:
        note = pick(draw, ("a file", "a file", "a file", "no file", "part", "whole", "place"))
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    if note == "a file":
        note = spoil_file(draw, pick(draw, files))
    elif note in ("no file", "part", "whole"):
        options = {"no file": files, "part": sorted(folder.iterdir()), "whole": [folder]}
        note = replace_file(draw, pick(draw, options[note]))
    elif note == "place":
        place.secret()
        argv = [*argv, f"data.cache_dir={pick(draw, (*_PATHS, 'new cache'))}"]
    return Case(argv, note, valid=valid)


_STEPS = ("", 0, 1, 2, 99, -1, 1.5, 10**8, "x", "2@2")


def run(draw: Draw[Any], place: Place, valid: bool) -> Case:
    """Resume the base's run for one step or read it by a tool, with a spoiled record."""
    if valid:
        use = pick(draw, ("resume", "branch", "weights"))
        folder = place.copied(place.base.run, "run" if use == "resume" else "old")
        argv = {
            "resume": place.resuming(),
            "branch": place.resuming(f"resume.from={folder}@1", "optim.lr=1e-4"),
            "weights": place.training(f"model.init_from={folder}"),
        }[use]
        return Case(argv, use, valid=True)
    use = pick(draw, ("resume", "resume", "path", "show", "export", "model"))
    if use == "path":
        place.copied(place.base.run, "old")
        path = pick(draw, (*(f"old@{step}" for step in _STEPS), "@1", "old/checkpoints", *_PATHS))
        argv = [
            f"{pick(draw, ('resume.from', 'resume.from', 'model.init_from', 'run.dir'))}={path}"
        ]
        argv += [
            f"resume.allow={pick(draw, ('', 'probe', 'optim.lr', 'model_config', 'a,b', '[1]'))}"
        ]
        argv += [pick(draw, ("optim.lr=1e-4", "model.overrides.hidden_size=32", "train.seed=5"))]
        return Case(place.resuming(*argv), " ".join(argv)[:120])
    folder = place.copied(place.base.run)
    records = ("status.json", "plan.json", "metrics.jsonl", "events.jsonl", "lock")
    name = pick(draw, (*records, *records, "a folder", "an addition"))
    if name == "lock":
        write_json(folder / "owner.json", {"pid": 1, "host": "elsewhere", "since": "2026-01-01"})
        note = spoil_file(draw, folder / "owner.json")
        (folder / "lock").unlink(missing_ok=True)
        if os.path.lexists(folder / "owner.json"):
            (folder / "owner.json").rename(folder / "lock")
    elif name in records:
        note = spoil_file(draw, folder / name)
    elif name == "a folder":
        parts = ("heartbeats", "checkpoints", "export", "tokenizer", "checkpoints/latest", "lock")
        note = replace_file(draw, folder / pick(draw, parts))
    else:
        note = _add_to_run(draw, folder)
    if use == "show":
        return Case([str(folder), "--step", "1"], note, main="tools.show_batch")
    if use == "export":
        argv = [str(folder), "--out", str(place.folder / "out"), "--no-check"]
        return Case(argv, note, main="tools.export_hf")
    if use == "model":
        return Case(place.training("model.name=run", "run.dir=new"), note)
    return Case(place.resuming(), note)


def _add_to_run(draw: Draw[Any], folder: Path) -> str:
    steps = ("step-00000009", "step-x", f"step-{'9' * 40}", ".step-00000003", "latest",
             "step-00000003.unfinished")  # fmt: skip
    name = pick(draw, ("heartbeats/hang-1.json", *(f"checkpoints/{step}" for step in steps)))
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if draw(st.booleans()):
        path.write_text(pick(draw, ("{", "../../x\n", "")))
    else:
        path.mkdir()
    return f"{name} more"


def checkpoint(draw: Draw[Any], place: Place, valid: bool) -> Case:
    """Resume or export the newest checkpoint, or read its weights, after it was spoiled."""
    folder = place.copied(place.base.run)
    newest, note = folder / "checkpoints" / "step-00000002", "valid"
    if pick(draw, (True, False, False, False)):  # nothing to fall back to
        shutil.rmtree(folder / "checkpoints" / "step-00000001")
    if not valid:
        note = pick(draw, ("a file", "signed", "signed", "manifest", "pieces"))
    manifest = json.loads((newest / "manifest.json").read_text())
    if note == "a file":
        note = spoil_file(draw, pick(draw, sorted(newest.iterdir())))
    elif note != "valid":  # signed again after the change, as only its writer could
        if note == "signed":
            names = [path.name for path in sorted(newest.iterdir()) if path.name != "manifest.json"]
            note += " " + spoil_file(
                draw, newest / pick(draw, (*names, "index.json", "index.json"))
            )
        elif note == "manifest" and draw(st.booleans()):
            manifest[pick(draw, manifest)] = draw(HOSTILE)
        elif note == "manifest":
            manifest = draw(changed(manifest))
        else:
            note = _spoil_pieces(draw, place, newest)
        _sign(newest, manifest)
    use = pick(draw, ("resume", "resume", "resume", "export", "weights"))
    if use == "export":
        argv = [str(folder), "--out", str(place.folder / "out")]
        return Case(argv, f"{use}: {note}", main="tools.export_hf", valid=valid)
    if use == "weights":
        argv = place.training(f"model.init_from={folder}@2", "run.dir=new")
        return Case(argv, f"{use}: {note}", valid=valid)
    return Case(place.resuming(), f"{use}: {note}", valid=valid)


def _spoil_pieces(draw: Draw[Any], place: Place, folder: Path) -> str:
    """Change a position in the index that refers to elements of a file."""
    path = folder / "index.json"
    index = json.loads(path.read_text())
    about = index[pick(draw, index)]
    offset, numel, file = about["at"][0]
    way = pick(draw, ("overlap", "cut", "outside", "link", "value"))
    if way == "overlap":
        about["at"] = [[offset, numel // 2, file], [offset, numel - numel // 2, file]]
    elif way == "cut":
        about["at"][0] = about["at"][0][: pick(draw, (0, 1, 2))]
    elif way == "outside":
        about["at"][0][2] = pick(draw, ("../../../secret.txt", str(place.secret())))
    elif way == "link":
        part = folder / pick(draw, (file, "probe.safetensors"))
        shutil.move(part, place.folder / "elsewhere")
        part.symlink_to(place.folder / "elsewhere")
    else:
        about["at"][0][pick(draw, (0, 1, 2))] = draw(HOSTILE)
    write_json(path, index)
    return f"pieces: {way}"


def _sign(folder: Path, manifest: Any) -> None:
    """Write a manifest whose sizes and hashes match its files, and whose checksum matches
    itself.
    """
    files = manifest.get("files") if isinstance(manifest, dict) else None
    for file in files if isinstance(files, list) else ():
        if isinstance(file, dict) and isinstance(name := file.get("name"), str):
            path = folder / name
            if name and "\0" not in name and len(name) < 250 and path.is_file():
                with path.open("rb") as content:
                    data = content.read(10**8)  # not all of /dev/zero
                file.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    if isinstance(manifest, dict):
        plain = json.dumps({**manifest, "checksum": ""}, sort_keys=True).encode()
        manifest["checksum"] = hashlib.sha256(plain).hexdigest()
    write_json(folder / "manifest.json", manifest)


class Global:
    """Pickled as the global of that name, called with the arguments or with the attributes set."""

    def __init__(self, name: str, *arguments: Any, **attributes: Any) -> None:
        self.module, _, self.name = name.partition(" ")
        self.arguments, self.attributes = arguments, attributes


class _Pickler(pickle._Pickler):  # type: ignore[name-defined,misc]
    """Writes globals by name without importing them."""

    write: Callable[[bytes], None]

    def save(self, value: Any, save_persistent_id: bool = True) -> None:
        if not isinstance(value, Global):
            return super().save(value, save_persistent_id)
        self.write(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())
        if value.attributes:
            self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
            self.save(value.attributes)
            return self.write(pickle.BUILD)
        self.save(value.arguments)
        return self.write(pickle.REDUCE)


def _dump(value: Any, file: Any, protocol: int) -> None:
    _Pickler(file, protocol).dump(value)


def _save(value: Any, path: Path, **options: Any) -> None:
    """Save as torch.save does, with globals by name."""
    import torch

    module = types.SimpleNamespace(Pickler=_Pickler, dump=_dump, __name__="pickle")
    torch.save(value, path, pickle_module=module, pickle_protocol=2, **options)


def _states(stage: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return one rank's optimizer with two parameters, and the model, as DeepSpeed saves them."""
    import torch

    moments = {"step": torch.tensor(2.0), "exp_avg": torch.ones(10), "exp_avg_sq": torch.ones(10)}
    base = {"state": {0: moments}, "param_groups": [{"lr": 0.1}]}
    flat, fragment = [torch.arange(10.0)], "deepspeed.utils.tensor_fragment fragment_address"
    if stage == 3:
        optimizer = {"zero_stage": 3, "partition_count": 1, "fp32_flat_groups": flat,
                     "optimizer_state_dict": base}  # fmt: skip
    else:
        scaler = Global("deepspeed.runtime.fp16.loss_scaler DynamicLossScaler", cur_scale=65536.0,
                        cur_iter=3, last_overflow_iter=-1, cur_hysteresis=2)  # fmt: skip
        places = {"w": Global(fragment, numel=6, start=0), "b": Global(fragment, numel=4, start=6)}
        optimizer = {
            "zero_stage": stage,
            "partition_count": [1],
            "single_partition_of_fp32_groups": flat,
            "base_optimizer_state": base,
            "param_slice_mappings": [places],
            "loss_scaler": scaler,
        }
    model = {
        "param_shapes": [{"w": torch.Size([2, 3]), "b": torch.Size([4])}],
        "buffer_names": ["c"],
        "module": {"c": torch.ones(2)},
        "global_steps": 2,
        "global_samples": 16,
        "skipped_steps": 0,
    }
    ds_config = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    return {"optimizer_state_dict": optimizer, "ds_config": ds_config}, model


def _payloads(target: str) -> list[Global]:
    """Return calls that would create the marker, and objects of allowed classes."""
    code, mkdir = f"import os; os.mkdir({target!r})", Global("posix mkdir", target)
    touch = f"touch {target}"
    calls = {
        "builtins exec": [code], "__builtin__ exec": [code], "runpy _run_code": [code, {}],
        "builtins eval": [f"__import__('os').mkdir({target!r})"], "os mkdir": [target],
        "posix system": [touch], "nt system": [touch], "subprocess Popen": [["touch", target]],
        "subprocess check_output": [["touch", target]], "pathlib Path.touch": [target],
        "builtins open": [target, "w"], "shutil copyfile": ["/etc/hostname", target],
        "torch.serialization load": [target], "torch.hub load": [target],
        "torch._dynamo.guards eval": [code], "operator attrgetter": ["system"],
        "functools partial": [mkdir], "numpy.core.multiarray _reconstruct": [mkdir],
        "collections OrderedDict": [mkdir], "torch._utils _rebuild_tensor_v2": [mkdir],
        "deepspeed.utils.tensor_fragment fragment_address": [mkdir],
        "deepspeed.runtime.zero.config ZeroStageEnum": ["x"],
        "torch Tensor": [], "torch device": ["nowhere"], "torch.nn.parameter Parameter": [],
    }  # fmt: skip
    scaler = "deepspeed.runtime.fp16.loss_scaler LossScaler"
    objects = [Global(scaler, a=mkdir), Global(f"{scaler}.__init__", a=1)]
    return [mkdir, *(Global(name, *words) for name, words in calls.items()), *objects]


def pickles(draw: Draw[Any], place: Place, valid: bool) -> Case:
    """Import a checkpoint in DeepSpeed's own format, as the Trainer writes it."""
    stage = pick(draw, (1, 2, 3))
    optimizer, model = _states(stage)
    engine = place.folder / "output" / "checkpoint-2" / "global_step2"
    engine.mkdir(parents=True)
    config = engine.parent / "config.json"
    tiny = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    write_json(config, {"model_type": "llama", **dict.fromkeys(tiny, 4), "intermediate_size": 8})
    names = ("optim_states.pt", "model_states.pt")
    note, options, trees = "valid", {}, dict(zip(names, (optimizer, model), strict=True))
    if not valid:
        note = pick(draw, ("changed", "changed", "planted", "planted", "file", "archive", "name"))
    name = pick(draw, names)
    if note == "changed":
        trees[name] = draw(changed(trees[name]))
    elif note == "planted":
        holder, key = draw_slot(draw, trees[name])
        holder[key] = pick(draw, _payloads(str(place.marker)))
        note = f"{holder[key].module} {holder[key].name} at {key}"
        options = {"_use_new_zipfile_serialization": pick(draw, (True, True, False))}
    prefix = "zero_pp_rank_0_" if stage == 3 else ""
    states = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    paths = {
        names[0]: engine / (states if stage == 3 else f"bf16_{states}"),
        names[1]: engine / f"{prefix}mp_rank_00_model_states.pt",
    }
    for each_name, path in paths.items():
        try:
            _save(trees[each_name], path, **options)
        except (RecursionError, RuntimeError, TypeError, ValueError, OverflowError) as error:
            note += f" (not pickled: {type(error).__name__})"
    if note == "file":
        note = spoil_file(draw, pick(draw, (*paths.values(), config, config)))
    elif note == "archive":
        note = _change_archive(draw, place, paths[name])
    elif note == "name":
        ranks = ("rank_1", "rank_x", "rank_0_0")
        paths[name].rename(engine / paths[name].name.replace("rank_0", pick(draw, ranks)))
    argv = [str(place.folder / "output"), "--out", str(place.folder / "new")]
    return Case(argv, f"ZeRO {stage}: {note}", main="tools.import_checkpoint", valid=valid)


def _change_archive(draw: Draw[Any], place: Place, path: Path) -> str:
    """Write the same zip file with a member duplicated, missing or replaced."""
    payload = io.BytesIO()
    call = Global("posix mkdir", str(place.marker))
    _Pickler(payload, 2).dump({"optimizer_state_dict": call})
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    way = pick(draw, ("second", "replaced", "raw", "no data", "compressed"))
    table = next(name for name in members if name.endswith("data.pkl"))
    method = zipfile.ZIP_DEFLATED if way == "compressed" else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            if way != "no data" or "/data/" not in name:
                is_replaced = way == "replaced" and name == table
                archive.writestr(name, payload.getvalue() if is_replaced else data)
        if way == "second":
            archive.writestr(pick(draw, (table, "x/data.pkl", "data.pkl")), payload.getvalue())
    if way == "raw":
        path.write_bytes(payload.getvalue())
    return f"{path.name}: {way}"


_EXPORTS = (
    *("--dtype int8", "--shard-size 0", "--shard-size 1e3", "--shard-size -1GB", "--shard-size"),
    *(f"--shard-size {'9' * 400}", "--step 99", "--step -1", "--step x", f"--step {'9' * 30}"),
    *("--trust-remote-code", "--bogus", "x"),
)


def export(draw: Draw[Any], place: Place, valid: bool) -> Case:
    """Export the base's run with other arguments, another tokenizer or another plan."""
    run_folder = place.copied(place.base.run)
    folder, secret = run_folder / "tokenizer", place.secret()
    argv, note = [str(run_folder), "--out", str(place.folder / "out")], "valid"
    changes: dict[str, Callable[[], object]] = {
        "plan": lambda: spoil_file(draw, run_folder / "plan.json"),
        "a link to a secret": lambda: (folder / "vocab.txt").symlink_to(secret),
        "a linked folder": lambda: (folder / "more").symlink_to("../.."),
        "code": lambda: place.plant_code(folder),
        "a folder inside": lambda: (folder / "more" / "more").mkdir(parents=True),
        "a file": lambda: spoil_file(draw, pick(draw, sorted(folder.glob("*.json")))),
        "no folder": lambda: replace_file(draw, folder),
        "named like weights": lambda: (folder / "model.safetensors").write_text("x"),
        "named like the config": lambda: (folder / "config.json").write_text("{"),
    }
    if valid:
        argv += pick(draw, ("", "--step 1", "--dtype bf16", "--shard-size 100KB")).split()
    elif (
        note := pick(draw, ("arguments", "arguments", "arguments", "out", *changes))
    ) == "arguments":
        argv += (note := pick(draw, _EXPORTS)).split()
    elif note == "out":
        argv[-1] = note = pick(draw, (*_PATHS, "run", "run/checkpoints"))
    else:
        changes[note]()
    return Case(argv, note[:100], main="tools.export_hf", valid=valid)


# Invalid arguments of the tools that prepare data.
_WRONG = {
    "tools.tokenize_data": "--workers=0 --workers=x --task=3 --tasks=0 --out=nowhere/x --bogus "
    "--out= --out=/dev/null/x --config=nowhere.toml data.path=nowhere x",
    "tools.clean_data": "--workers=0 --recipe=nowhere --recipe= --recipe=secret.txt --bogus x.y=1 "
    "language.keep=x url=1 near_duplicates.buckets=-1 bad_words.file=x",
    "tools.train_tokenizer": "--vocab-size=1 --vocab-size=x --vocab-size=99999999999 --kind=x "
    "--vocab-size=16777216 --bogus --text=nowhere --text=",
}


def preparing(draw: Draw[Any], place: Place, valid: bool) -> Case:
    """Run a tool on possibly spoiled data, or with a spoiled argument or recipe."""
    main: str = pick(draw, _WRONG)
    wrong = "nothing" if valid else pick(draw, ("data", "data", "argument", "word", "recipe"))
    shape = pick(draw, _SHAPES if wrong == "data" else ("lines", "texts"))
    path, note = _SHAPES[shape](draw, place, wrong != "data")
    if main == "tools.tokenize_data":
        place.copied(place.base.cache)
        argv = [f"data.path={path}", f"data.tokenizer={place.base.tokenizer}", "--workers=1"]
        argv += [f"data.cache_dir={place.folder / 'cache'}"]
        if "chats" in note:
            argv.append("data.template=chatml")
    elif main == "tools.clean_data":
        valid = valid and "prompts" not in note and "chats" not in note
        argv = [str(path), str(place.folder / "cleaned"), "--workers=1", "--recipe=light"]
    else:
        argv = [str(path), str(place.folder / "new-tokenizer"), "--vocab-size=300"]
    place.secret()
    if wrong == "recipe" and main == "tools.clean_data":
        text = pick(
            draw, sorted((REPOSITORY / "tools/cleaning/recipes").glob("*.toml"))
        ).read_bytes()
        (place.folder / "recipe.toml").write_bytes(draw(damaged(text)))
        argv[-1] = f"--recipe={place.folder / 'recipe.toml'}"
    elif wrong in ("argument", "recipe"):
        argv.append(pick(draw, _WRONG[main].split()))
    elif wrong == "word":
        argv.append(draw_word(draw))
    return Case(argv, f"{main}, {wrong}: {note} {ascii(argv[-1])[:80]}", main=main, valid=valid)


# fmt: off
KINDS = {data: 160, weights: 120, tokenizer: 80, cache: 70, run: 110, checkpoint: 120,
         pickles: 80, export: 80, preparing: 90}
# fmt: on


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_inputs_keep_the_rule(inputs: Inputs, kind: Any) -> None:
    inputs.brief(kind, 2)


@pytest.mark.gate("inputs")
@pytest.mark.parametrize("kind", KINDS)
def test_seeded_inputs_keep_the_rule(inputs: Inputs, kind: Any) -> None:
    inputs.seeded(kind, KINDS[kind])


def _read_index(path: Path) -> object:
    from harness.checkpoint.index import Index

    return Index(read_json(path, 10**6)).check()


_HEADER = encoded(json.dumps({"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}))
_INDEX = {"w": {"shape": [2, 3], "kinds": ["weight"], "at": [[0, 4, "a"], [4, 2, "b"]]}}
_READERS: dict[str, tuple[Callable[[Path], object], bytes]] = {
    "index.json": (_read_index, encoded(json.dumps(_INDEX))),
    "w.safetensors": (read_header, struct.pack("<Q", len(_HEADER)) + _HEADER + bytes(24)),
    "status.json": (read_object, b'{"step": 2, "state": "running"}'),
    "metrics.jsonl": (lambda path: [*read_lines(path, "step")], b'{"step": 1, "loss": 2.5}\n' * 3),
}


@MANY
@pytest.mark.parametrize("name", _READERS)
def test_a_spoiled_file_is_read_or_refused(name: str, count: int, tmp_path: Path) -> None:
    """In this process, which is a thousand times faster."""
    read, content = _READERS[name]

    @each(count)
    @given(st.data())
    def test(data: st.DataObject) -> None:
        path = tmp_path / "folder" / name
        remove(path.parent)
        path.parent.mkdir()
        path.write_bytes(content)
        data.draw(st.composite(spoil_file)(path))
        assume(path.is_file() and not path.is_symlink())
        with contextlib.suppress(Unusable, ConfigError):
            read(path)

    test()
