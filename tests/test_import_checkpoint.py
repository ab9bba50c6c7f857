"""Training resumes from DeepSpeed's own checkpoints, and no code in them runs."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.checkpoint.reader import Reader
from harness.checkpoint.store import checkpoint_of
from harness.runfolder import RunFolder
from tests.engine.small import MODEL
from tests.real_runs import REPOSITORY, SMALL_MODEL, run_ranks, train_command
from tools.import_checkpoint import main
from tools.importing import write

ELSEWHERE = REPOSITORY / "tests" / "trained_elsewhere.py"
JSONS = REPOSITORY / "ds_configs"


@pytest.mark.gate("runs")
@pytest.mark.parametrize("zero", [{"stage": 2}, {"stage": 3, "sub_group_size": 9000}])
def test_run_of_the_trainer_goes_on(zero: dict[str, int], data: list[str], tmp_path: Path) -> None:
    """Every weight and moment is what DeepSpeed reports; with ZeRO 3, from many flat tensors."""
    config = {**MODEL, "vocab_size": 512, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    ds = {
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        **dict.fromkeys((*auto, "gradient_clipping"), "auto"),
    }
    (tmp_path / "ds.json").write_text(json.dumps(ds))
    out, new = tmp_path / "trainer", tmp_path / "new"
    command = [sys.executable, ELSEWHERE, out, tmp_path / "ds.json", tmp_path]
    run_ranks(command, tmp_path / "a").succeeded()
    assert main([str(out), "--out", str(new)]) == 0
    checkpoint = checkpoint_of(f"{new}@3")
    assert checkpoint.state.samples == 12
    assert checkpoint.manifest.engine["optimizer"] == {"step": 3.0}
    reader = Reader.of(checkpoint)
    expected = torch.load(out / "expected.pt")
    assert sorted(reader.index) == sorted(expected)
    for name, kinds in expected.items():
        for kind, tensor in kinds.items():
            assert torch.equal(reader.whole(name, kind), tensor), (name, kind)
    command = train_command("--deepspeed", JSONS / "zero3.json", *data, "train.steps=4")
    command = [w for w in command if w not in SMALL_MODEL]
    model = out / "checkpoint-3" / "config.json"
    command += [f"resume.from={new}@3", f"model.name={model}", "data.seq_len=16"]
    command += ["resume.allow=data_fingerprint", f"run.dir={tmp_path / 'branch'}"]
    run_ranks(command, tmp_path / "b", ranks=1).succeeded()


class _Attack:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


OPTIM, MODEL_FILE = (
    f"global_step1/zero_pp_rank_0_mp_rank_00_{kind}_states.pt" for kind in ("optim", "model")
)


def _checkpoint(folder: Path, **optimizer: Any) -> Path:
    """Write a checkpoint as the Trainer does, with one rank and one parameter."""
    path = folder / "checkpoint-1"
    (path / "global_step1").mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(MODEL))
    model = {"param_shapes": [{"w": torch.Size([2, 3])}], "buffer_names": [], "module": {}}
    share = {
        "zero_stage": 3,
        "partition_count": 1,
        "fp32_flat_groups": [torch.arange(6.0)],
        "optimizer_state_dict": {"state": {0: {"exp_avg": torch.ones(6)}}, "param_groups": []},
        **optimizer,
    }
    torch.save({"optimizer_state_dict": share, "ds_config": {}}, path / OPTIM)
    torch.save(model, path / MODEL_FILE)
    return folder


def change(path: Path, key: str, value: object) -> None:
    """Set the value of a dotted key in a pickle; GONE removes it."""
    content = torch.load(path, weights_only=True)
    *way, last = [int(word) if word.isdigit() else word for word in key.split(".")]
    place: Any = content
    for word in way:
        place = place[word]
    place[last] = value
    if value is GONE:
        del place[last]
    torch.save(content, path)


GONE = object()
STATE = "optimizer_state_dict"
ODD = [
    *((OPTIM, STATE, value) for value in (GONE, None, 3, [])),
    *((OPTIM, f"{STATE}.zero_stage", value) for value in ("3", None, 7, -1, [3], torch.ones(2))),
    *((OPTIM, f"{STATE}.partition_count", value) for value in ("1", None, [], ["x"], -1)),
    *((OPTIM, f"{STATE}.fp32_flat_groups", value) for value in (GONE, 3, "x", [3], {}, [None])),
    (OPTIM, f"{STATE}.fp32_flat_groups.0", torch.zeros(6, dtype=torch.complex64)),
    (OPTIM, f"{STATE}.fp32_flat_groups.0", torch.eye(6).to_sparse()),
    (OPTIM, f"{STATE}.fp32_flat_groups.0", torch.zeros(1).expand(10**12)),
    *((OPTIM, f"{STATE}.{STATE}", value) for value in (GONE, 3, {}, {"state": 3})),
    *((OPTIM, f"{STATE}.{STATE}.state", value) for value in ({1: {}}, {0: 3}, {}, [{}])),
    *((OPTIM, f"{STATE}.{STATE}.state.0.step", value) for value in ("x", None, [1], float("nan"))),
    (OPTIM, f"{STATE}.{STATE}.state.0.exp_avg", torch.zeros(5)),
    *((OPTIM, "ds_config", value) for value in (3, "x", {"bf16": 3}, {"fp16": [1]})),
    *((MODEL_FILE, "param_shapes", value) for value in (GONE, 3, [3], [{"w": 3}], [{"w": ["x"]}])),
    (MODEL_FILE, "param_shapes", torch.ones(2)),
    *((MODEL_FILE, "param_shapes.0.w", value) for value in ([-2, -3], None, torch.Size([7]))),
    *((MODEL_FILE, "buffer_names", value) for value in (GONE, 3, [3])),
    *((MODEL_FILE, "module", value) for value in (GONE, 3, None)),
    *((MODEL_FILE, "global_steps", value) for value in ("x", -1, [1], 2.5)),
    *((MODEL_FILE, "frozen_param_shapes", value) for value in (3, {"f": 3}, {"f": [2]})),
]


Imported = Callable[[Path], tuple[int, str]]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return _checkpoint(tmp_path / "source") / "checkpoint-1"


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return tmp_path / "new"


@pytest.fixture
def imported(new: Path, capsys: pytest.CaptureFixture[str]) -> Imported:
    """Return a function that imports into `new`, and returns the exit code and the message."""
    return lambda source: (main([str(source), "--out", str(new)]), capsys.readouterr().err)


@pytest.mark.parametrize(("file", "key", "value"), ODD)
def test_foreign_dict_is_rejected_with_file_and_key(
    file: str, key: str, value: object, source: Path, new: Path, imported: Imported
) -> None:
    change(source / file, key, value)
    code, error = imported(source)
    assert code == 77
    assert str(source / "global_step1") in error
    assert not [*new.glob("checkpoints/*")]


def test_a_folder_within_a_file_is_a_wrong_argument(source: Path, tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("mine")
    assert main([str(source), "--out", str(tmp_path / "file" / "x")]) == 2
    assert str(tmp_path / "file" / "x") in capsys.readouterr().err


def test_after_an_interruption_the_same_command_imports(
    source: Path, new: Path, imported: Imported, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even after one during the copy of the tokenizer."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).write_text("{}")

    def interrupted(source: Path, folder: Path) -> list[str]:
        (folder / "tokenizer.json").write_text((source / "tokenizer.json").read_text())
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(write, "copy_tokenizer", interrupted)
        assert imported(source)[0] == 130
    assert not [path for path in new.rglob("*") if path.is_file()]
    assert imported(source)[0] == 0
    names = sorted(path.name for path in RunFolder(new).tokenizer_dir.iterdir())
    assert names == ["tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize(("elements", "code"), [(2, 0), (3, 77)])
def test_frozen_weights_are_whole(
    elements: int, code: int, source: Path, new: Path, imported: Imported
) -> None:
    change(source / MODEL_FILE, "frozen_param_shapes", {"f": [elements]})
    change(source / MODEL_FILE, "frozen_param_fragments", {"f": torch.ones(2)})
    assert imported(source)[0] == code
    indices = [json.loads(path.read_text()) for path in new.rglob("index.json")]
    assert ["f" in index for index in indices] == [True] * (code == 0)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "7", "null", "{}", '{"model_type": 3}', "\x00"),
        '{"a": ' * 100_000 + "1" + "}" * 100_000,
    ],
)
def test_a_config_of_another_make_is_named(text: str, source: Path, imported: Imported) -> None:
    (source / "config.json").write_text(text)
    code, error = imported(source)
    assert code == 2
    assert str(source / "config.json") in error


@pytest.mark.parametrize(("file", "code"), [(OPTIM, 77), (MODEL_FILE, 77), ("config.json", 2)])
def test_import_rejects_a_pipe(file: str, code: int, source: Path, imported: Imported) -> None:
    (source / file).unlink()
    os.mkfifo(source / file)
    ended, error = imported(source)
    assert ended == code
    assert f"{source / file} is not a regular file" in error


def test_planted_call_is_refused_not_made(tmp_path: Path, new: Path, imported: Imported) -> None:
    target = tmp_path / "made"
    code, error = imported(_checkpoint(tmp_path / "source", loss_scaler=_Attack(target)))
    assert code == 77
    assert "asks for posix.mkdir" in error
    assert not target.exists()
    assert not (new / "checkpoints").exists()


def test_a_small_one_is_imported_whole(source: Path, new: Path, imported: Imported) -> None:
    assert imported(source)[0] == 0
    reader = Reader.of(checkpoint_of(str(new)))
    assert torch.equal(reader.whole("w", "weight"), torch.arange(6.0).view(2, 3))
    assert torch.equal(reader.whole("w", "exp_avg"), torch.ones(2, 3))


def test_shards_of_two_zero3_ranks_are_joined(source: Path, new: Path, imported: Imported) -> None:
    """From three flat tensors of each rank; the second rank's shares end with padding."""
    change(source / MODEL_FILE, "param_shapes", [dict.fromkeys("abc", torch.Size([5]))])
    change(source / MODEL_FILE, "frozen_param_shapes", {"f": [3]})
    change(source / OPTIM, f"{STATE}.partition_count", 2)
    change(source / OPTIM, f"{STATE}.{STATE}.state", {n: {"m": torch.ones(3)} for n in range(3)})
    for rank in (1, 0):
        flats = [torch.arange(3.0) + 3 * rank + 10 * number for number in range(3)]
        change(source / OPTIM, f"{STATE}.fp32_flat_groups", flats)
        change(source / MODEL_FILE, "frozen_param_fragments", {"f": torch.arange(2.0) + 2 * rank})
        for file in (OPTIM, MODEL_FILE) if rank else ():
            shutil.copy(source / file, source / file.replace("rank_0", "rank_1", 1))
    assert imported(source)[0] == 0
    reader = Reader.of(checkpoint_of(str(new)))
    for number, name in enumerate("abc"):
        assert torch.equal(reader.whole(name, "weight"), torch.arange(5.0) + 10 * number)
    assert torch.equal(reader.whole("f", "weight"), torch.arange(3.0))


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ({"partition_count": 2}, "was saved by 2 ranks, but has the files of 0"),
        ({"fp32_flat_groups": [torch.arange(5.0)]}, "5 elements"),
        ({"optimizer_state_dict": None}, "in an unknown format"),
    ],
)
def test_incomplete_deepspeed_checkpoint_is_rejected(
    optimizer: dict[str, Any], said: str, tmp_path: Path, new: Path, imported: Imported
) -> None:
    code, error = imported(_checkpoint(tmp_path / "source", **optimizer))
    assert code == 77
    assert said in error
    assert not [*new.glob("checkpoints/*")]


def _saved_by_deepspeed(folder: Path, step: int) -> None:
    """Write what save_checkpoint writes: two ranks of ZeRO 1, one parameter, one frozen."""
    path = folder / f"global_step{step}"
    path.mkdir(parents=True)
    base = {"state": {0: {"exp_avg": torch.ones(4)}}, "param_groups": [{"step": step}]}
    for rank in range(2):  # 4 elements, and the other 2 behind one of something else
        share = {
            "zero_stage": 1,
            "partition_count": [2],
            "single_partition_of_fp32_groups": [torch.arange(4.0) + 3 * rank + step],
            "base_optimizer_state": base,
            "param_slice_mappings": [{"w": {"start": rank, "numel": 4 - 2 * rank}}],
        }
        optimizer = {"optimizer_state_dict": share, "ds_config": {"fp16": {"enabled": True}}}
        torch.save(optimizer, path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    model = {"param_shapes": [{"w": torch.Size([2, 3])}], "module": {"b": torch.ones(3)}}
    model |= {"buffer_names": ["b", "not saved"], "global_samples": 8 * step}
    model |= {"frozen_param_shapes": {"f": torch.Size([2])}, "global_steps": step}
    model |= {"frozen_param_fragments": {"f": torch.arange(2.0)}}
    torch.save(model, path / "mp_rank_00_model_states.pt")
    (folder / "latest").write_text(path.name)


@pytest.mark.parametrize(
    ("named", "step"),
    [("saved", 9), ("saved@20", 20), ("saved/global_step20", 20), ("older", 20), ("named", 5)],
)
def test_what_deepspeed_saved_is_imported_from_its_folder(
    named: str, step: int, tmp_path: Path, new: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, each in (("saved", 20), ("saved", 9), ("older", 7), ("older", 20)):
        _saved_by_deepspeed(tmp_path / folder, each)  # `latest` names the one written last
    (tmp_path / "older" / "latest").unlink()
    _saved_by_deepspeed(tmp_path / "named", 5)
    (tmp_path / "named" / "global_step5").rename(tmp_path / "named" / "best")
    command = [str(tmp_path / named), "--out", str(new)]
    assert main(command) == 2
    assert "config.json does not exist: name the model, as in --model" in capsys.readouterr().err
    assert main([*command, "--model", "tiny"]) == 0
    checkpoint = checkpoint_of(str(new))
    assert (checkpoint.state.step, checkpoint.state.samples) == (step, 8 * step)
    manifest, reader = checkpoint.manifest, Reader.of(checkpoint)
    assert (manifest.precision, manifest.engine["optimizer"]) == ("fp16", {"step": step})
    assert manifest.model_config["model_type"] == "llama"
    assert torch.equal(reader.whole("w", "weight"), torch.arange(6.0).view(2, 3) + step)
    assert torch.equal(reader.whole("f", "weight"), torch.arange(2.0))
    assert torch.equal(reader.whole("b", "buffer"), torch.ones(3))


def test_a_wrong_argument_is_refused(tmp_path: Path, source: Path, imported: Imported) -> None:
    assert imported(tmp_path / "nothing")[0] == 2
    code, error = imported(tmp_path)
    assert code == 2
    assert "holds no checkpoint" in error
    code, error = imported(Path(f"{source.parent}@7"))
    assert code == 2
    assert "checkpoints of steps [1], not of 7" in error
    assert imported(source.parent)[0] == 0
    assert imported(source.parent)[0] == 2
