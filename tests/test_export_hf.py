"""The export tool: from any layout, without DeepSpeed, and only with its probe's loss."""

import json
import re
import shutil
import subprocess
import sys
from argparse import ArgumentTypeError
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.checkpoint.reader import Reader
from harness.checkpoint.store import checkpoint_of
from harness.errors import ConfigError
from harness.run import exporting
from harness.run.exporting import ExportDiffers, ExportOptions, attention_of_run, export
from harness.runfolder import RunFolder
from tests.real_runs import REPOSITORY, environment, run_ranks, train_command
from tests.tables import beside
from tools.export_hf import _bytes, main

JSONS = REPOSITORY / "ds_configs"
WITHOUT_DEEPSPEED = beside(__file__, "export_hf.toml")["without_deepspeed"]


@pytest.fixture(scope="module")
def run(data: list[str], tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Return a run of two steps on two ranks with ZeRO 3, exported at its end."""
    folder = tmp_path_factory.mktemp("runs")
    command = train_command(
        *("--deepspeed", JSONS / "zero3.json", *data, f"run.dir={folder / 'run'}"),
        *("train.steps=2", "save.every=1", "save.export=true"),
    )
    run_ranks(command, folder / "logs").succeeded()
    return RunFolder(folder / "run")


@pytest.fixture
def copy(run: RunFolder, tmp_path: Path) -> RunFolder:
    """Return a copy of the run, to be damaged."""
    shutil.copytree(run.path, tmp_path / "run")
    return RunFolder(tmp_path / "run")


def with_manifest(run: RunFolder, **changes: Any) -> Any:
    """Return the run's last checkpoint with a changed manifest."""
    checkpoint = checkpoint_of(str(run.path))
    return replace(checkpoint, manifest=replace(checkpoint.manifest, **changes))


@pytest.mark.gate("runs")
def test_tool_writes_what_the_run_wrote_without_deepspeed(run: RunFolder, tmp_path: Path) -> None:
    tool = [sys.executable, "-c", WITHOUT_DEEPSPEED, REPOSITORY / "tools" / "export_hf.py"]
    words = [*tool, run.path, "--out", tmp_path / "export"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"written (\d+\.\d\d MiB) of \1 \(100%\)", done.stderr)
    assert "its probe loss is" in done.stdout
    for path in run.export_dir.iterdir():
        assert (tmp_path / "export" / path.name).read_bytes() == path.read_bytes(), path.name
    ids = AutoTokenizer.from_pretrained(tmp_path / "export")("the model reads").input_ids
    assert ids == AutoTokenizer.from_pretrained(run.tokenizer_dir)("the model reads").input_ids
    written = load_file(tmp_path / "export" / "model.safetensors")
    reader = Reader.of(checkpoint_of(str(run.path)))
    assert sorted(written) == sorted(reader.index)
    assert all(torch.equal(t, reader.whole(n, "weight")) for n, t in written.items())


@pytest.mark.gate("runs")
def test_an_earlier_step_in_another_dtype_and_in_shards(run: RunFolder) -> None:
    assert main([f"{run.path}@1", "--dtype", "bf16", "--shard-size", "100KB"]) == 0
    folder = run.path / "export-step-1"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    reader = Reader.of(checkpoint_of(f"{run.path}@1"))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, reader.whole(name, "weight").bfloat16()), name


def test_another_model_than_was_saved_gets_no_name(run: RunFolder, tmp_path: Path) -> None:
    """The same would happen if other weights had been written; here, a norm differs."""
    right = checkpoint_of(str(run.path)).manifest
    wrong = with_manifest(run, model_config={**right.model_config, "rms_norm_eps": 0.1})
    with pytest.raises(ExportDiffers, match=rf"a loss of {right.probe_loss:.7g} .* has \d"):
        export(wrong, tmp_path / "export", run.tokenizer_dir, ExportOptions())
    assert list(tmp_path.iterdir()) == []
    for options, why in (
        (ExportOptions(check=False), "not requested"),
        (ExportOptions(most_checked=9), "it has more than 9 parameters"),
    ):
        told = export(wrong, tmp_path / "export", run.tokenizer_dir, options)
        assert told.startswith(f"its loss was not checked: {why}; serve it with vllm serve ")


def test_an_export_says_what_a_killed_one_left(run: RunFolder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(exporting, "_export_adapters", lambda *_: "adapters")
    monkeypatch.setattr(exporting, "sweep", lambda folder: [folder / "left"])
    for adapters, rest in (({"r": 4}, "adapters"), (None, "its loss was not checked")):
        saved, folder = with_manifest(run, adapters=adapters), tmp_path / rest
        told = export(saved, folder, run.tokenizer_dir, ExportOptions(check=False))
        assert told.startswith(f"removed {folder / 'left'}, left by a killed export; {rest}")


@pytest.mark.parametrize(
    "damaged",
    [[], {"model": 3}, {"model": {"attention": "performer"}}, {"model": {"attention": 1}}],
)
def test_a_plan_that_does_not_say_what_was_trained_is_named(
    damaged: Any, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunFolder, "read_plan", lambda _: {"run": damaged})
    with pytest.raises(ConfigError, match=r"plan\.json does not say which attention was trained"):
        attention_of_run(checkpoint_of(str(run.path)))


@pytest.mark.gate("runs")
def test_a_checkpoint_of_another_loss_is_no_good_one(copy: RunFolder, tmp_path, capsys) -> None:
    """All files are as signed, but the weights do not give the saved loss."""
    checkpoint = checkpoint_of(str(copy.path))
    off = replace(checkpoint.manifest, probe_loss=1000.0)
    (checkpoint.path / "manifest.json").write_bytes(off.to_bytes())
    words = [str(copy.path), "--out", str(tmp_path / "export")]
    assert main(words) == 77
    assert "saved with a loss of 1000 on its probe batch" in (error := capsys.readouterr().err)
    assert "--no-check exports it anyway" in error
    assert not (tmp_path / "export").exists()
    assert main([*words, "--no-check"]) == 0


def test_damaged_checkpoint_is_refused(copy: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    before = (copy.export_dir / "model.safetensors").read_bytes()
    for path in copy.checkpoints_dir.glob("*/rank-00001-000.safetensors"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    assert main([str(copy.path)]) == 77
    assert "SHA-256" in capsys.readouterr().err
    assert main([str(copy.path), "--step", "9"]) == 77
    assert (copy.export_dir / "model.safetensors").read_bytes() == before


@pytest.mark.gate("runs")
def test_what_is_no_file_of_a_tokenizer_is_not_shared(copy: RunFolder, tmp_path, capsys) -> None:
    """A run from someone else may contain links to files of the user who exports it."""
    secret = tmp_path / "secret"
    secret.write_text("not to be shared")
    (copy.tokenizer_dir / "vocab.txt").symlink_to(secret)
    (copy.tokenizer_dir / "code.py").write_text("raise SystemExit")
    assert main([str(copy.path), "--out", str(tmp_path / "export"), "--no-check"]) == 0
    assert f"not copied from {copy.tokenizer_dir}: code.py, vocab.txt" in capsys.readouterr().out
    names = sorted(path.name for path in (tmp_path / "export").iterdir())
    assert names == sorted(path.name for path in copy.export_dir.iterdir())


@pytest.mark.gate("runs")
def test_a_run_without_steps_is_exported_too(data: list[str], tmp_path: Path) -> None:
    """It is a pipeline, so no rank has the whole model."""
    run = RunFolder(tmp_path / "run")
    command = train_command(
        *("--deepspeed", JSONS / "pipeline2.json", *data, f"run.dir={run.path}"),
        *("train.steps=0", "save.export=true", "model.overrides.tie_word_embeddings=true"),
    )
    run_ranks(command, tmp_path / "logs").succeeded()
    config = json.loads((run.export_dir / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    written = load_file(run.export_dir / "model.safetensors")
    assert "lm_head.weight" not in written
    assert checkpoint_of(str(run.path)).state.step == 0


def test_wrong_arguments_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (
        [str(tmp_path / "nothing")],
        [str(tmp_path), "--dtype", "int8"],
        [str(tmp_path), "--shard-size", "four"],
        [str(tmp_path), "--shard-size", "9" * 400],
        [str(tmp_path), "--out", "\udcff"],
        ["~nosuchuser"],
        [f"{tmp_path}@3", "--step", "4"],
    ):
        with pytest.raises(SystemExit) as caught:
            main(wrong)
        assert caught.value.code == 2
    assert "name different steps" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 77  # a folder without a checkpoint


BROKEN = ["", "{", "[]", "null", '{"run": ', "\0", '{"run": ' + "9" * 5000 + "}", "{}" * 2]
# Which a tool that reads the run config needs.
EMPTIED = ({"run": None}, {"run": {"optim": 3}}, {"model_config": []}, {"data_fingerprint": 7})
NEEDED = ["{}", *(json.dumps({"run": {}, "model_config": {}, **keys}) for keys in EMPTIED)]


@pytest.mark.parametrize("text", [*BROKEN, *NEEDED])
def test_a_broken_plan_is_named(text: str, tmp_path, capsys) -> None:
    """Both tools that read it report it."""
    path, show_batch = tmp_path / "plan.json", import_module("tools.show_batch").main
    path.write_text(text)
    assert show_batch([str(tmp_path), "--step", "1"]) == 2
    assert f"{path} {'is damaged' if text in NEEDED else ''}" in capsys.readouterr().err
    if text in BROKEN:
        assert main([str(tmp_path)]) == 2
        assert f"{path} " in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [path]


def test_shard_size_is_parsed() -> None:
    for text in ("0", "0.5", "9" * 400, "four"):
        with pytest.raises(ArgumentTypeError, match="is not a size"):
            _bytes(text)
    assert [_bytes(t) for t in ("4GB", "500mb", "1.5 k", "7")] == [4 * 10**9, 5 * 10**8, 1500, 7]
