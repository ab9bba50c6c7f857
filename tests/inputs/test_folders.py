"""Wrong data, tokenizers, weights, caches, runs, checkpoints and pickles."""

import gzip
import hashlib
import json
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from harness.checkpoint.index import Index
from harness.errors import ConfigError, Unusable
from harness.files.records import read_lines, read_object
from harness.files.regular_file import read_json
from harness.files.tensor_header import read_header
from tests.inputs import values
from tests.inputs.rule import GATE, MANY, MARKER, SECRET, each, keeps_the_rule
from tests.inputs.test_configs import TURNS
from tests.inputs.values import LFS_POINTER, encoded
from tests.real_runs import SHORT_RUN, SMALL_MODEL, write_corpus
from tests.tables import beside

# Without a watchdog, which would end this process long after a run that failed.
_RUN = [*SHORT_RUN, "ds.zero_optimization.reduce_bucket_size=1000000", "data.held_out=0.2",
        "guard.hang_floor_s=0"]  # fmt: skip
_SHARED = [*_RUN, *SMALL_MODEL, "data.cache_dir=cache", "save.every=1", "data.path=corpus"]
_NEW = [*_RUN, "train.steps=1", "run.dir=new"]
_DATA = [*_NEW, *SMALL_MODEL, "data.tokenizer=run/tokenizer", "data.cache_dir=new-cache"]
_MODEL = [*_NEW, "data.cache_dir=cache", "data.path=corpus"]
_BASES = {"data": _DATA, "model": _MODEL, "shared": _SHARED, "none": []}
# Commands that read valid inputs: the files to spoil, and the arguments of train.py or of a tool.
USES: dict[str, tuple[str, list[str]]] = {
    name: (use["files"], [*_BASES[use["base"]], *use["arguments"]])
    for name, use in beside(__file__, "uses.toml").items()
}
each_use = pytest.mark.parametrize("use", USES)
_TABLES = beside(__file__, "folders.toml")


def _use(name: str, note: object = "") -> int:
    main = name if name.startswith("tools.") else "harness.train"
    return keeps_the_rule(main, USES[name][1], note)


def _files_of(use: str) -> list[Path]:
    return [path for path in sorted(Path().glob(USES[use][0])) if path.is_file()]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with valid inputs, made by the real commands."""
    import pyarrow
    from pyarrow import parquet

    folder = tmp_path_factory.mktemp("inputs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("DS_ACCELERATOR", "cpu")
        texts = [path.read_text() for path in sorted(write_corpus(Path("corpus"), 30).iterdir())]
        records: dict[str, list[Any]] = {
            "lines": [{"text": text} for text in texts],
            "prompts": [{"prompt": text[:40], "completion": text} for text in texts],
            "chats": [{"messages": TURNS, "tools": [{"name": "add"}]}] * 30,
        }
        for name in records:
            lines = b"".join(encoded(record) + b"\n" for record in records[name])
            Path(f"{name}.jsonl").write_bytes(lines)
            Path(f"{name}.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
            Path(f"{name}.json").write_bytes(encoded(records[name]))
        Path("table.csv").write_text("\n".join(["text", *(f'"{text}"' for text in texts)]))
        parquet.write_table(pyarrow.table({"text": texts}), "table.parquet", row_group_size=7)
        argv = [*_SHARED, "train.steps=2", "save.export=true", "run.dir=run"]
        assert keeps_the_rule("harness.train", argv, limit_s=600) == 0  # imports everything
        argv = ["run", "--out", "sharded", "--shard-size", "100KB", "--no-check"]
        assert keeps_the_rule("tools.export_hf", argv) == 0
        for tokens in Path("cache").glob("tokens-*/tokens.*"):
            shutil.copy(tokens, tokens.name)
        write_checkpoint(3)
    return folder


@pytest.fixture
def fresh(place: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that puts new copies of all valid inputs into the current folder."""

    def copy() -> None:
        monkeypatch.chdir(place.parent)
        shutil.rmtree(place)
        shutil.copytree(base, place)
        monkeypatch.chdir(place)
        Path("secret.txt").write_text(f"{SECRET}\n")

    copy()
    return copy


@GATE
@each_use
def test_valid_inputs_are_accepted(fresh: Any, use: str) -> None:
    assert _use(use) == 0


def _sign() -> None:
    """Write manifests that match their files and themselves, as only their writer could."""
    for path in Path("run/checkpoints").glob("*/manifest.json"):
        manifest = json.loads(path.read_text())
        for file in manifest["files"]:
            data = (path.parent / file["name"]).read_bytes()
            file.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        plain = json.dumps({**manifest, "checksum": ""}, sort_keys=True).encode()
        path.write_bytes(encoded({**manifest, "checksum": hashlib.sha256(plain).hexdigest()}))


@GATE
@each_use
def test_a_spoiled_file_ends_cleanly(fresh: Any, use: str) -> None:
    contents = {file: file.read_bytes() for file in _files_of(use)}

    def test(drawn: tuple[Path, bytes, bool]) -> None:
        fresh()
        file, data, is_signed = drawn
        file.write_bytes(data)
        if is_signed and file.name != "manifest.json" and "step-" in str(file):
            _sign()
        _use(use, f"{file} is {data[:1000]!r}")

    def spoiling(file: Path) -> st.SearchStrategy[Any]:
        return st.tuples(st.just(file), values.spoiled(contents[file], file.suffix), st.booleans())

    each(15, st.sampled_from([*contents]).flatmap(spoiling), test)


def _set(path: str, value: object, *keys: str | int) -> Callable[[], None]:
    """Return a function that sets a value of a JSON file, and signs the checkpoints. An empty key
    is the first one.
    """

    def change() -> None:
        tree = place = json.loads(Path(path).read_text())
        for key in keys[:-1]:
            place = place[key or (min(place) if isinstance(place, dict) else 0)]
        place[keys[-1]] = value
        Path(path).write_bytes(encoded(tree))
        _sign()

    return change


def _elsewhere(pattern: str) -> Callable[[], None]:
    """Return a function that moves a file out of its folder and leaves a link."""

    def move() -> None:
        path = min(Path().glob(pattern))
        shutil.move(path, "elsewhere")
        path.symlink_to(Path("elsewhere").absolute())

    return move


def _plant(folder: str, *names: str) -> Callable[[], None]:
    """Return a function that adds code to be imported, a template, and pickles as the weights."""
    template = f"{{{{ cycler.__init__.__globals__.os.mkdir('{MARKER}') }}}}"
    auto = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X",
            "AutoTokenizer": ["tokenization_x.XTokenizer", None]}  # fmt: skip

    def plant() -> None:
        for name in ("configuration_x", "modeling_x", "tokenization_x", "sitecustomize", "torch"):
            code = f"import pathlib\npathlib.Path({MARKER!r}).touch()\n"
            Path(folder, f"{name}.py").write_text(code)
        for name in names:
            Path(folder, "model.safetensors").unlink(missing_ok=True)
            Path(folder, name).write_bytes(_PAYLOADS[0])
            index = {"metadata": {}, "weight_map": {"lm_head.weight": names[0]}}
            Path(folder, f"{name}.index.json").write_bytes(encoded(index))
        for path in map(str, Path(folder).glob("*config.json")):
            _set(path, auto, "auto_map")()
            _set(path, template, "chat_template")()

    return plant


def _link(path: str, target: str) -> Callable[[], None]:
    return lambda: Path(path).symlink_to(target)


def _text(data: bytes, path: str = "corpus/7.txt") -> Callable[[], object]:
    return lambda: Path(path).write_bytes(data)


_CHANGES: dict[str, Callable[..., Any]] = {"set": _set, "elsewhere": _elsewhere, "plant": _plant}
_CHANGES |= {"link": _link, "folder": lambda path: Path(path).mkdir}
# Changes of valid inputs: those that must be refused, and others.
_REFUSED: list[tuple[str, Callable[[], object]]] = [
    *((use, _CHANGES[change](*words)) for use, change, *words in _TABLES["refused"]),
    ("weights", _text(LFS_POINTER, "run/export/model.safetensors")),
    ("texts", lambda: [path.write_text("") for path in Path("corpus").iterdir()]),
    ("texts", lambda: [path.unlink() for path in Path("corpus").iterdir()]),
    *((f"tokens.{end}", _text(b"\xff\xff" * 5000, f"tokens.{end}")) for end in ("bin", "idx")),
]
_OTHERS: list[tuple[str, Callable[[], object]]] = [
    *((use, _CHANGES[change](*words)) for use, change, *words in _TABLES["others"]),
    ("resume", _text(b"../../x", "run/checkpoints/latest")),
    *(("resume", _text(data, "run/lock")) for data in (b"{", b'{"pid": "1"}', b"[]")),
    *(("texts", _text(data)) for data in (
      b"", b"\xff\xfea\0", "ü".encode("latin-1"), bytes(10**5), b"x" * 10**6, b"\xed\xa0\x80",
      b"</s><s><unk>" * 500, "a".encode("utf-32"), LFS_POINTER)),
    *(("texts", _text(b"a b c\n" * 99, f"corpus/{name}")) for name in ("a.JSONL", "a.csv", ".a",
      "a.parquet", "a.pt", "a.tar", "a.txt.gz", "a.png", "\udcff\n.txt")),
    ("texts", lambda: Path("corpus", *"abcdefgh" * 20).mkdir(parents=True)),
]  # fmt: skip


@GATE
@pytest.mark.parametrize("number", range(len(_REFUSED) + len(_OTHERS)))
def test_listed_changes_of_folders_end_cleanly(fresh: Any, number: int) -> None:
    use, change = [*_REFUSED, *_OTHERS][number]
    change()
    assert _use(use) != 0 or number >= len(_REFUSED)


@GATE
def test_paths_of_folders_are_read_or_refused(fresh: Any) -> None:
    for path in values.PATHS:
        for key in ("data.path", "data.cache_dir", "model.init_from", "resume.from", "run.dir"):
            keeps_the_rule("harness.train", [*USES["cache"][1], f"{key}={path}"])
            fresh()
        keeps_the_rule("tools.export_hf", ["run", "--out", path])
        fresh()


def _states(stage: int) -> list[dict[str, Any]]:
    """Return one rank's optimizer with two parameters, and the model, as DeepSpeed saves them."""
    moments = {"step": torch.tensor(2.0), "exp_avg": torch.ones(10), "exp_avg_sq": torch.ones(10)}
    adam = {"state": {0: moments}, "param_groups": [{"lr": 0.1}]}
    if stage == 3:
        flat = [torch.arange(10.0)]
        optimizer = {"zero_stage": 3, "partition_count": 1, "fp32_flat_groups": flat,
                     "optimizer_state_dict": adam}  # fmt: skip
    else:
        from deepspeed.utils.tensor_fragment import fragment_address

        optimizer = {
            "zero_stage": stage, "partition_count": [1], "base_optimizer_state": adam,
            "single_partition_of_fp32_groups": [torch.arange(10.0)],
            "param_slice_mappings": [{"w": fragment_address(6, 0), "b": fragment_address(4, 6)}],
        }  # fmt: skip
    shapes = [{"w": torch.Size([2, 3]), "b": torch.Size([4])}]
    model = {"param_shapes": shapes, "buffer_names": ["c"], "module": {"c": torch.ones(2)},
             "global_steps": 2, "global_samples": 16, "skipped_steps": 0}  # fmt: skip
    config = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    return [{"optimizer_state_dict": optimizer, "ds_config": config}, model]


def write_checkpoint(stage: int, trees: list[Any] | None = None) -> list[Path]:
    """Write a checkpoint in DeepSpeed's own format, as the Trainer does."""
    engine = Path("output/checkpoint-2/global_step2")
    shutil.rmtree("output", ignore_errors=True)
    engine.mkdir(parents=True)
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    config = {"model_type": "llama", **dict.fromkeys(sizes, 4), "intermediate_size": 8}
    (engine.parent / "config.json").write_bytes(encoded(config))
    names = ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt")
    paths = [engine / names[0], engine / f"{'zero_pp_rank_0_' if stage == 3 else ''}{names[1]}"]
    for path, tree in zip(paths, trees or _states(stage), strict=True):
        torch.save(tree, path)
    return paths


def _text_in_pickle(text: str) -> bytes:
    text = text.format(marker=MARKER, code=f"import os; os.mkdir({MARKER!r})")
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _pickle(name: str, *words: str) -> bytes:
    """Return a dict whose value is the call of a global with texts. torch reads these opcodes."""
    path, texts = name.replace(" ", "\n").encode(), b"".join(map(_text_in_pickle, words))
    return b"\x80\x02}%bc%b\n(%btRs." % (_text_in_pickle("optimizer_state_dict"), path, texts)


_PAYLOADS = [_pickle(*row) for row in _TABLES["payloads"]]


def _imports(note: object = "") -> int:
    shutil.rmtree("out", ignore_errors=True)
    return _use("tools.import_checkpoint", note)


def _archived(path: Path, way: str, payload: bytes) -> None:
    """Put a pickle into a file of torch.save: as a member, beside one, or as the whole file."""
    with zipfile.ZipFile(path) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    table = next(name for name, _ in members if name.endswith("data.pkl"))
    if way == "replaced":
        members = [(name, payload if name == table else data) for name, data in members]
    elif way == "no data":
        members = [(name, data) for name, data in members if "/data/" not in name]
    elif way in ("second", "beside"):
        members.append((table if way == "second" else "x/data.pkl", payload))
    method = zipfile.ZIP_DEFLATED if way == "compressed" else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members:
            archive.writestr(name, data)
    if way == "raw":
        path.write_bytes(payload)


@GATE
@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("way", ["second", "beside", "replaced", "raw", "no data", "compressed"])
def test_a_pickle_in_a_changed_archive_is_never_executed(place: Path, way: str) -> None:
    for stage in (1, 3):
        for number in range(2):
            _archived(write_checkpoint(stage)[number], way, _PAYLOADS[0])
            _imports(way)


@GATE
@pytest.mark.parametrize("way", ["replaced", "raw"])
def test_a_payload_in_a_pickle_is_never_executed(place: Path, way: str) -> None:
    for payload in _PAYLOADS:
        _archived(write_checkpoint(2)[0], way, payload)
        assert _imports(payload) != 0


@GATE
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_changed_states_in_a_pickle_end_cleanly(place: Path, stage: int) -> None:
    write_checkpoint(stage)
    assert _imports() == 0
    for number in range(2):
        for other in values.variants(_states(stage)[number])[::5]:
            trees = _states(stage)
            trees[number] = other
            write_checkpoint(stage, trees)
            _imports(other)


def _read_index(path: Path) -> object:
    return Index(read_json(path, 10**6)).check()


_HEADER = {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
_INDEX = {"w": {"shape": [2, 3], "kinds": ["weight"], "at": [[0, 4, "a"], [4, 2, "b"]]}}


def _safetensors(header: object) -> bytes:
    return struct.pack("<Q", len(encoded(header))) + encoded(header) + bytes(24)


_READERS: dict[str, tuple[Callable[[Path], object], bytes]] = {
    "index.json": (_read_index, encoded(_INDEX)),
    "w.safetensors": (read_header, _safetensors(_HEADER)),
    "status.json": (read_object, b'{"step": 2, "state": "running"}'),
    "metrics.jsonl": (lambda path: [*read_lines(path, "step")], b'{"step": 1, "loss": 2}\n' * 3),
}


@MANY
@pytest.mark.parametrize("name", _READERS)
def test_a_spoiled_file_is_read_or_refused(name: str, count: int, tmp_path: Path) -> None:
    reader, content = _READERS[name]
    path = tmp_path / name

    def test(data: bytes) -> None:
        path.write_bytes(data)
        try:
            reader(path)
        except (Unusable, ConfigError):
            return

    for data in (b"", *values.RAW):
        test(data)
    each(count, values.spoiled(content, path.suffix), test)


@pytest.mark.parametrize("value", [True, 1.5, "1", None, -1, 2**63, [], {}, float("nan")])
@pytest.mark.parametrize("name", ["index.json", "w.safetensors"])
def test_counters_of_other_types_are_refused(name: str, value: Any, tmp_path: Path) -> None:
    path, (reader, _) = tmp_path / name, _READERS[name]
    for at in (0, 1):
        for key in ("shape", "at" if name == "index.json" else "data_offsets"):
            tree: Any = json.loads(json.dumps(_INDEX if name == "index.json" else _HEADER))
            row = tree["w"][key]
            (row[at] if key == "at" else row)[0] = value
            path.write_bytes(encoded(tree) if name == "index.json" else _safetensors(tree))
            with pytest.raises(Unusable):
                reader(path)
