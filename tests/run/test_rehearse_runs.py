"""Runs keep a sample of what they read, and later runs rehearse it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.data.indexed import IndexedTokens
from harness.runfolder import RunFolder
from tests.two_ranks import REPOSITORY, SHORT_RUN, SMALL_MODEL
from tools.proofs.zygote import Zygote

pytestmark = pytest.mark.slow

KEPT = 6


def trained(zygote: Zygote, folder: Path, *words: str, ranks: int = 1) -> RunFolder:
    json_path = REPOSITORY / "ds_configs" / "zero1.json"
    arguments = [f"--deepspeed={json_path}", *SMALL_MODEL, *SHORT_RUN, f"data.reservoir={KEPT}"]
    ended = zygote.run(
        [*arguments, *words, f"run.dir={folder}"],
        folder.parent / f"{folder.name}-logs",
        ranks=ranks,
    )
    assert ended.codes == [0] * ranks, ended.output
    return RunFolder(folder)


@pytest.fixture(scope="module")
def first(
    zygote: Zygote, data: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunFolder, list[str]]:
    words = [*data, "data.vocab_size=512"]
    return trained(zygote, tmp_path_factory.mktemp("first") / "run", *words), words


def files_of(run: RunFolder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(run.reservoir_dir.iterdir())}


def test_a_run_that_was_resumed_keeps_the_same_sample(
    first: tuple[RunFolder, list[str]], zygote: Zygote, tmp_path: Path
) -> None:
    """In another layout, too: byte for byte."""
    whole, words = first
    facts = json.loads((whole.reservoir_dir / "facts.json").read_text())
    fingerprint = json.loads(whole.plan_path.read_text())["data_fingerprint"]
    assert facts["of"] == f"0:{fingerprint}"
    assert facts["train_tokens"] == facts["held_out_tokens"] == 33
    assert len(IndexedTokens(whole.reservoir_dir / "train").ids) == 33 * KEPT
    folder = tmp_path / "run"
    half = files_of(trained(zygote, folder, *words, "train.steps=2", ranks=2))
    assert half.keys() == files_of(whole).keys()
    assert half != files_of(whole)
    assert files_of(trained(zygote, folder, *words)) == files_of(whole)


def test_a_later_run_rehearses_it_and_measures_forgetting(
    first: tuple[RunFolder, list[str]], zygote: Zygote, tmp_path: Path
) -> None:
    run, words = first
    new = tmp_path / "new.jsonl"
    new.write_text("\n".join(json.dumps({"text": f"{n} is a number " * 9}) for n in range(99)))
    cache = next(word for word in words if word.startswith("data.cache_dir"))
    words = [cache, f"data.path={new}", f"model.init_from={run.path}", "eval.every=2"]
    words += ["optim.schedule=constant"]
    words += [f"data.rehearse={run.path}", "data.rehearse_share=0.25"]
    second = trained(zygote, tmp_path / "second", *words, "train.steps=2")
    lines = {line["step"]: line for line in second.read_metrics()}
    assert lines[0]["old_eval_loss"] != lines[2]["old_eval_loss"]
    last = [line for line in run.read_metrics() if "eval_loss" in line][-1]
    assert lines[0]["old_eval_loss"] == pytest.approx(last["eval_loss"], rel=1e-5)
    assert {"loss/new", "loss/rehearsed"} <= lines[2].keys()
    assert json.loads(second.plan_path.read_text())["data_mixture"] == [[0, [3, 1]]]
    whole = trained(zygote, tmp_path / "whole", *words)
    resumed = trained(zygote, tmp_path / "second", *words, ranks=2)
    ends = [run.read_metrics()[-1] for run in (whole, resumed)]
    assert ends[1]["old_eval_loss"] == pytest.approx(ends[0]["old_eval_loss"], rel=1e-5)
    assert files_of(resumed) == files_of(whole)
