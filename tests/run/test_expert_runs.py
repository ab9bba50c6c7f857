"""A whole run of divided experts: their load, the comparison, the export, and on in ZeRO 3."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.config.data_section import DataConfig
from harness.data.build import build_data
from harness.data.spec import DataSpec
from harness.runfolder import RunFolder
from tests.two_ranks import REPOSITORY, SHORT_RUN, events
from tools.proofs.models import LEARNED
from tools.proofs.zygote import Zygote

pytestmark = pytest.mark.slow

DIVIDED = ("ds.expert_parallel.enabled=true", "ds.expert_parallel.autoep_size=2")
EXPERTS, STEPS, SEQ_LEN = 4, 6, 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("mixture") / "mixtral.json"
    path.write_text(json.dumps({**LEARNED["mixtral"], "vocab_size": 512}))
    return f"model.name={path}"


def train(zygote: Zygote, run: RunFolder, stage: int, *more: str) -> None:
    words = [
        *(f"--deepspeed={REPOSITORY / 'ds_configs' / f'zero{stage}.json'}", *SHORT_RUN),
        *(f"train.steps={STEPS}", "save.every=3", "save.export=true"),
        *(f"run.dir={run.path}", *more),
    ]
    ended = zygote.run(words, run.path.parent / "logs")
    assert ended.codes == [0, 0], ended.output


@pytest.fixture(scope="module")
def divided(
    tmp_path_factory: pytest.TempPathFactory, zygote: Zygote, data: list[str], model: str
) -> RunFolder:
    run = RunFolder(tmp_path_factory.mktemp("experts") / "run")
    train(zygote, run, 1, *data, model, *DIVIDED)
    return run


def curve(run: RunFolder) -> dict[int, tuple[float, float]]:
    return {m["step"]: (m["loss"], m["grad_norm"]) for m in run.read_metrics() if "loss" in m}


def test_every_step_has_the_load_of_the_experts(divided: RunFolder) -> None:
    lines = [line for line in divided.read_metrics() if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert 1 <= line["expert_load_max"] <= EXPERTS
        assert 0 < line["expert_load_entropy"] <= 1
    assert len({line["expert_load_max"] for line in lines}) > 1


def test_the_first_batch_is_that_of_the_undivided_model(divided: RunFolder) -> None:
    (verified,) = events(divided, "verified")
    assert (verified["loss"], verified["grad_norm"]) == pytest.approx(curve(divided)[1], rel=1e-5)


def test_zero_3_without_division_goes_on(
    divided: RunFolder, zygote: Zygote, data: list[str], model: str, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    shutil.copytree(divided.path, run.path)
    shutil.rmtree(run.checkpoints_dir / f"step-{STEPS:08}")
    train(zygote, run, 3, *data, model)
    (resumed,) = events(run, "resumed")
    assert "deepspeed" in {change["key"] for change in resumed["changes"]}
    assert "expert_load_max" not in run.read_metrics()[-1]
    for step, values in curve(divided).items():
        assert curve(run)[step] == pytest.approx(values, rel=1e-5)


def test_the_exports_held_out_loss_is_the_runs(divided: RunFolder, data: list[str]) -> None:
    path, cache = (argument.partition("=")[2] for argument in data)
    config = DataConfig(path=path, cache_dir=cache, seq_len=SEQ_LEN)
    batch = build_data(DataSpec(config, model_vocab_size=512)).held_out.batch(0, 8)  # eval.samples
    model = AutoModelForCausalLM.from_pretrained(divided.export_dir, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
    assert float(loss) == pytest.approx(divided.read_metrics()[-1]["eval_loss"], rel=1e-5)
