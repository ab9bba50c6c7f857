"""Exports equal those of save_pretrained, and have the config keys that version 4 reads."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from tokenizers import normalizers
from torch import nn
from transformers import AutoModelForCausalLM

from harness.checkpoint import export
from harness.checkpoint.export import replacing, sweep, write_adapters, write_model
from harness.checkpoint.hub_layout import HubLayout, rewrite_config, rewrite_tokenizer_config
from harness.checkpoint.index import BUFFER, WEIGHT, Index, to_index
from harness.checkpoint.reader import Reader
from harness.checkpoint.tensor_file import Fragment, TensorWriter, write_fragments
from harness.data.tokenizer import load_tokenizer, spm_model, to_backend, wrap
from harness.errors import ConfigError
from harness.layout.box import Part
from harness.layout.releases import is_older
from harness.models.skeleton import hf_config, skeleton
from tests.data.number_tokenizer import write_number_tokenizer
from tests.engine.small import BIASED, CONFIGS, FAMILIES, MODEL
from tests.models.small import built
from tests.real_runs import REPOSITORY
from tests.tables import beside

TABLES = beside(__file__, "export.toml")
MODELS: dict[str, dict[str, Any]] = {
    **FAMILIES,
    **{name: CONFIGS[name] for name in ("llama", "gpt2", "mixtral")},
    "llama_tied": {**MODEL, "tie_word_embeddings": True},
    # A correction bias of its routers, which is a saved buffer.
    "ernie4_5_moe": {**BIASED["ernie4_5_moe"], "tie_word_embeddings": False},
}
if is_older((5, 23)):  # it leaves that family's routers uninitialised
    del MODELS["ernie4_5_moe"]
# transformers 5 holds their experts in one tensor, and saves each separately. It counts only the
# first of them when it fills shards, which then exceed their size.
EXPERTS_APART = {"mixtral", "qwen2_moe", "qwen3_moe", "ernie4_5_moe"}


def drawn(config: dict[str, Any], precision: str) -> Any:
    model = built(config, precision, "eager")
    for number, buffer in enumerate(model.buffers()):
        if buffer.is_floating_point():
            buffer.add_(number + 1)
    return model


def stored(model: nn.Module, folder: Path, cuts: int = 3) -> Reader:
    """Return a model's fp32 weights as several ranks would have saved them."""
    folder.mkdir()
    kept = model.state_dict()
    tensors = {name: (WEIGHT, p.detach().float()) for name, p in model.named_parameters()}
    tensors |= {name: (BUFFER, b) for name, b in model.named_buffers() if name in kept}
    fragments = [
        Fragment(name, Part.of(tensor.shape), 0, {kind: tensor.reshape(-1)})
        for name, (kind, tensor) in tensors.items()
    ]
    entries = []
    for rank in range(cuts):
        parts = [f.share(rank, cuts) if WEIGHT in f.tensors else f for f in fragments]
        mine = [p for p in parts if p is not None and (rank == 0 or WEIGHT in p.tensors)]
        entries += write_fragments(folder, rank, mine)[1]
    return Reader(folder, Index(to_index(entries)))


def contents(folder: Path) -> dict[str, Any]:
    """Return the content of every file: tensors by name, text unchanged."""
    by_file: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                assert file.metadata() == {"format": "pt"}
                by_file[path.name] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        else:
            by_file[path.name] = json.loads(path.read_text())
    return by_file


def shards(folder: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    return [content for name, content in folder.items() if name.endswith(".safetensors")]


def merged(folder: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return all tensors, each from the file that the index names."""
    files = folder["model.safetensors.index.json"]["weight_map"]
    assert sum(map(len, shards(folder))) == len(files)
    return {name: folder[file][name] for name, file in files.items()}


def size(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def assert_same_tensors(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(ours) == sorted(expected)
    for name, tensor in expected.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(ours[name], tensor), name


def test_each_tensor_of_experts_is_converted_by_itself() -> None:
    layout = HubLayout(skeleton(hf_config(MODELS["mixtral"]), torch.float32, "eager"), 1)
    assert {len(part.sources) for part in layout._parts} == {1}


@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
@pytest.mark.parametrize("family", sorted(MODELS))
def test_an_export_is_what_save_pretrained_writes(family: str, shard_bytes: int, tmp_path) -> None:
    precision = ("fp32", "bf16")[sorted(MODELS).index(family) % 2]
    model = drawn(MODELS[family], precision)
    reader = stored(model, tmp_path / "checkpoint")
    model.save_pretrained(tmp_path / "theirs", max_shard_size=shard_bytes)
    (tmp_path / "ours").mkdir()
    empty = skeleton(hf_config(MODELS[family]), model.dtype, "eager")
    write_model(tmp_path / "ours", empty, reader, shard_bytes)
    ours, theirs = contents(tmp_path / "ours"), contents(tmp_path / "theirs")
    assert ("model.safetensors" in ours) == (shard_bytes == 10**9)
    if shard_bytes == 20_000 and family in EXPERTS_APART:
        assert_same_tensors(merged(ours), merged(theirs))
        assert all(len(file) == 1 or size(file) <= shard_bytes for file in shards(ours))
        return
    opened, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=model.dtype, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert_same_tensors(opened.state_dict(), model.state_dict())
    assert sorted(ours) == sorted(theirs)
    for name, content in theirs.items():
        if name.endswith(".safetensors"):
            assert_same_tensors(ours[name], content)
        elif name == "config.json":  # ours has additional keys for version 4
            assert content.items() <= ours[name].items()
        else:
            assert ours[name] == content, name


def test_export_is_synced_before_and_after_the_rename(tmp_path: Path, synced: list[Path]) -> None:
    with replacing(tmp_path / "export") as unfinished:
        writer = TensorWriter(unfinished / "model.safetensors", {"x": torch.zeros(3)})
        writer.write("x", 0, torch.ones(3))
        writer.close()
        assert synced == [unfinished / "model.safetensors"]
        (unfinished / "config.json").write_text("{}")
    files = {unfinished / name for name in ("model.safetensors", "config.json")}
    assert {*synced[1:-2]} == files
    assert synced[-2:] == [unfinished, tmp_path]


def test_adapters_are_written_without_the_buffers_of_their_base(tmp_path: Path) -> None:
    """Such as the persistent buffers of DeepSeek's routers."""
    model = nn.Module()
    model.register_parameter("lora_A", nn.Parameter(torch.ones(2, 3)))
    model.register_buffer("e_score_correction_bias", torch.ones(4))
    reader = stored(model, tmp_path / "checkpoint")
    manifest = SimpleNamespace(adapters={"r": 2}, quantization={})
    saved: Any = SimpleNamespace(manifest=manifest)
    with mock.patch.object(Reader, "of", return_value=reader):
        write_adapters(saved, tmp_path, torch.float32, {}, {})
    with safe_open(tmp_path / "adapter_model.safetensors", framework="pt") as file:
        assert [*file.keys()] == ["base_model.model.lora_A"]


def test_export_folder_appears_atomically(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    for text in ("first", "second"):
        with replacing(folder) as unfinished:
            (unfinished / "config.json").write_text(text)
            (unfinished / "model.safetensors").touch()
            assert folder.exists() == (text == "second")
        assert (folder / "config.json").read_text() == text
    with pytest.raises(KeyboardInterrupt), replacing(folder):
        raise KeyboardInterrupt
    assert (folder / "config.json").read_text() == "second"
    assert list(tmp_path.iterdir()) == [folder]
    for name in ("a", "b", "c-d"):  # left by kills: here, on another host, of another folder
        (place := tmp_path / f".unfinished-export-{name}").mkdir()
        (place / ".lock").write_text("elsewhere" if name == "b" else export.socket.gethostname())
    folder.rename(tmp_path / ".unfinished-export-a" / "replaced")
    assert (sweep(folder), folder.exists()) == ([tmp_path / ".unfinished-export-a"], True)


SCRIPTS = beside(__file__, "export_scripts.toml")


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that is writing an export to `folder`; kill it with -9 at the end."""
    command = [sys.executable, "-c", SCRIPTS["writes"], str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as process:
        try:
            assert process.stdout.readline() == "writing\n"
            yield process
        finally:
            process.kill()


@pytest.mark.gate("checkpoints")
def test_leftovers_of_killed_exports_only_are_removed(tmp_path: Path) -> None:
    folder, other = tmp_path / "export", tmp_path / "export-step-1"
    with writing(folder), writing(other):
        (mine,) = (p for p in tmp_path.iterdir() if "step" not in p.name)
        assert sweep(folder) == []
        assert (mine / "export" / "config.json").exists()
    assert len(list(tmp_path.iterdir())) == 2
    assert sweep(folder) == [mine]
    (theirs,) = tmp_path.iterdir()
    assert sweep(other) == [theirs]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gate("checkpoints")
def test_export_moved_aside_before_a_kill_is_restored(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    with writing(folder):
        (place,) = tmp_path.iterdir()
        (place / "replaced").mkdir()
        (place / "replaced" / "config.json").write_text("the one before")
    assert sweep(folder) == [place]
    assert (folder / "config.json").read_text() == "the one before"
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("place", "problem"),
    [("", "not an exported model"), ("my.safetensors", "not an exported model")]
    + [(place, "cannot be created") for place in ("my.safetensors/x", "my.safetensors/x/y")],
)
def test_export_replaces_no_file_of_the_user(place: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "my.safetensors").write_text("mine")
    path = tmp_path / place
    with pytest.raises(ConfigError, match=f"{path} .*{problem}"), replacing(path):
        pass
    assert (tmp_path / "my.safetensors").read_text() == "mine"


LARGE = {
    "llama": {"intermediate_size": 4096, "num_hidden_layers": 8},
    # All experts of a layer are one tensor of 67 MB and one of half that size.
    "mixtral": {"intermediate_size": 1024, "num_hidden_layers": 3, "num_local_experts": 16},
}


@pytest.mark.gate("checkpoints")
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_export_memory_stays_below_a_third_more_than_a_shard(kind: str, tmp_path: Path) -> None:
    """For more than 300 MB of bf16 weights, exported from fp32."""
    shard_bytes, sizes = 64 * 10**6, {"hidden_size": 1024, "vocab_size": 16384, **LARGE[kind]}
    config = json.dumps({**MODEL, "model_type": kind, "num_attention_heads": 8, **sizes})
    command = [sys.executable, "-c", SCRIPTS["measure"], str(tmp_path), str(shard_bytes), config]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak, total = map(int, done.stdout.split())
    print(f"{kind}: peak {peak / shard_bytes:.2f} shards, {total / 1e6:.0f} MB written")
    assert total > 300e6
    assert peak < 1.3 * shard_bytes


Config = dict[str, Any]


def rewritten(folder: Path, config: Config) -> Config:
    """Return the config.json of an export of a model that came with `config`."""
    model = hf_config(config)
    model.save_pretrained(folder)
    assert rewrite_config(folder, model, config) == []
    values: Config = json.loads((folder / "config.json").read_text())
    again = getattr(hf_config(values), "rope_parameters", None) or {}
    own = getattr(model, "rope_parameters", None) or {}
    assert {key: value for key, value in again.items() if key != "type" or key in own} == own
    return values


@pytest.mark.parametrize("row", TABLES["config"])
def test_export_has_the_config_keys_of_transformers_4(row: Config, tmp_path: Path) -> None:
    values, expected = rewritten(tmp_path, {**MODEL, **row["given"]}), row["written"]
    assert {key: values.get(key, "not there") for key in expected} == expected


def test_export_omits_nonfinite_config_values(tmp_path: Path) -> None:
    values = rewritten(tmp_path, {"model_type": "mamba2"})
    assert "time_step_limit" not in values
    assert hf_config(values).time_step_limit == hf_config({"model_type": "mamba2"}).time_step_limit


@pytest.mark.parametrize(("written", "expected"), TABLES["tokenizers"])
def test_tokenizer_configs_are_of_version_4(written: Config, expected: Config, tmp_path) -> None:
    tokenizer = load_tokenizer(write_number_tokenizer(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(written))
    rewrite_tokenizer_config(tmp_path, tokenizer)
    values = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert {**values, **expected} == values
    assert isinstance(values.get("extra_special_tokens", {}), dict)


def test_rewritten_tokenizer_opens_in_transformers_5(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_number_tokenizer(tmp_path))
    tokenizer.add_special_tokens({"extra_special_tokens": ["<x>"]})
    tokenizer.save_pretrained(tmp_path)
    rewrite_tokenizer_config(tmp_path, tokenizer)
    again = load_tokenizer(tmp_path)
    assert again.extra_special_tokens == tokenizer.extra_special_tokens == ["<x>"]
    assert again("1 2 <x>").input_ids == tokenizer("1 2 <x>").input_ids


@pytest.mark.parametrize(("before", "denied"), [("", {"add_prefix_space"}), (" ", set())])
def test_llama_cpp_reads_spaces_and_added_tokens(before: str, denied: set[str], tmp_path) -> None:
    model = spm_model(["a b a b"], "bpe", 300)
    tokenizer = wrap(to_backend(model))
    if before:
        tokenizer.backend_tokenizer.normalizer = normalizers.Prepend(before)
    tokenizer.add_tokens(["<x>"], special_tokens=True)
    tokenizer.add_tokens(["<y>"])
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(model)
    rewrite_tokenizer_config(tmp_path, tokenizer)
    values = json.loads((tmp_path / "tokenizer_config.json").read_text())
    added = {token["content"]: token for token in values["added_tokens_decoder"].values()}
    assert [added[name]["special"] for name in ("<s>", "<x>", "<y>")] == [True, True, False]
    assert values["added_tokens_decoder"][str(len(tokenizer) - 1)] == added["<y>"]
    keys = {"add_bos_token", "add_prefix_space"} & values.keys()
    assert {key for key in keys if values[key] is False} == {"add_bos_token", *denied}
    again = load_tokenizer(tmp_path)
    assert again("a <x> <y></s>").input_ids == tokenizer("a <x> <y></s>").input_ids


def test_merged_adapters_have_the_config_that_version_4_reads(tmp_path: Path) -> None:
    export.merged(SimpleNamespace(merge_and_unload=lambda: built(MODEL)), tmp_path)
    assert "rope_theta" in json.loads((tmp_path / "config.json").read_text())
