"""A run with reversible layers: divided, resumed bit for bit, and begun with its weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoint.find import Store
from harness.runfolder import RunFolder
from tests.two_ranks import REPOSITORY, SHORT_RUN, events
from tools.proofs.zygote import Zygote

pytestmark = pytest.mark.slow

LINES = ("loss", "grad_norm")


@pytest.mark.parametrize("json_name", ["tensor2_zero1", "zero3_sequence8"])
def test_it_is_resumed_and_its_weights_begin_another(
    zygote: Zygote, data: list[str], tmp_path: Path, json_name: str
) -> None:
    def trained(run: Path, *more: str) -> dict[int, dict[str, Any]]:
        arguments = [
            *(f"--deepspeed={REPOSITORY / 'ds_configs' / json_name}.json", *SHORT_RUN, *data),
            *("ds.sequence_parallel_size=2",) * (json_name == "zero3_sequence8"),
            *("model.reversible=true", "model.dropout=0.1", "optim.schedule=constant"),
            *("train.steps=4", "save.every=2", "save.keep=9", "eval.every=2", f"run.dir={run}"),
            *more,
        ]
        ended = zygote.run(arguments, run.parent / f"{run.name}-logs", ranks=2)
        assert ended.codes == [0, 0], ended.output
        return {line["step"]: line for line in RunFolder(run).read_metrics()}

    whole = trained(tmp_path / "whole")
    # Compared with the undivided model, whose layers are reversible, too.
    assert events(RunFolder(tmp_path / "whole"), "verified")
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(Store(tmp_path / "again" / "checkpoints").at(4))
    again = trained(tmp_path / "again")
    for step in (3, 4):
        assert [again[step][name] for name in LINES] == [whole[step][name] for name in LINES]
    assert again[4]["eval_loss"] == whole[4]["eval_loss"]
    # Its weights are those of the run that wrote them: the first held-out loss is the last one.
    weights = f"model.init_from={tmp_path / 'whole'}"
    begun = trained(tmp_path / "begun", weights, "optim.lr=1e-9")
    assert begun[0]["eval_loss"] == pytest.approx(whole[4]["eval_loss"], rel=1e-5)
