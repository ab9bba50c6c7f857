"""Code of the user's own (docs/own_code.py) in whole runs, and stored plans that name such code."""

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from harness.checkpoint.compatibility import recorded_run
from harness.config.own import ROWS
from harness.errors import ConfigError
from harness.launch.fork_server import Zygote
from harness.plan.command import parse_command, plan_from
from harness.run.dry_run import dry_run
from harness.runfolder import RunFolder
from tests.real_runs import REPOSITORY, SHORT_RUN, SMALL_MODEL, events
from tests.run.features import LAYOUTS, in_gate, train
from tools import export_hf, report, show_batch

CODE = REPOSITORY / "docs" / "own_code.py"
OWN = (
    *("optim.name=plain_sgd", "train.loss=tempered", "model.attention=written_out"),
    *("optim.schedule=staircase", "own.stairs=1"),
)


def lines(run: RunFolder, name: str = "loss") -> list[float]:
    return [line[name] for line in run.read_metrics() if name in line]


@pytest.mark.slow("five whole runs on two ranks")
@pytest.mark.parametrize("layout", ["zero1", "zero3", in_gate("stages"), in_gate("sequences")])
def test_own_code_trains_resumes_and_exports(
    layout: str, zygote: Zygote, data: list[str], tmp_path: Path
) -> None:
    """It computes what the built-in rows compute, and its own keys change that."""
    code = tmp_path / "my.py"
    code.write_bytes(CODE.read_bytes())
    shared = [*SMALL_MODEL, *data, *LAYOUTS[layout].words, "optim.lr=0.3", "optim.momentum=0.9"]
    shared += ["save.every=2", "save.keep=9"]
    own = [*shared, *OWN, f"run.code={code}"]

    def trained(name: str, *words: str, code: int = 0) -> tuple[RunFolder, str]:
        path = tmp_path / name
        return RunFolder(path), train(zygote, LAYOUTS[layout].json, path, *words, code=code)

    def resumed(name: str, *words: str) -> RunFolder:
        shutil.copytree(run.path, tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoints/step-00000004")
        return trained(name, *own, *words)[0]

    def refused(*words: str) -> str:
        return _refused(run, f"--deepspeed={LAYOUTS[layout].json}.json", *own, *words)

    built_in, _ = trained("built-in", *shared, "optim.name=sgd", "optim.schedule=constant")
    run, output = trained("own", *own, "save.export=true")
    assert lines(run) == pytest.approx(lines(built_in), rel=1e-5)
    assert lines(run)[3] < lines(run)[0]
    assert lines(run, "learning_rate") == pytest.approx([0.3, 0.3, 0.3, 0.03])
    assert min(lines(run, "own/largest_weight")) > 0
    assert re.search(r"\(equal within .* %\); exports lack the attention written_out", output)
    assert len(events(run, "verified")) == LAYOUTS[layout].is_verified
    digest = hashlib.sha256(code.read_bytes()).hexdigest()
    assert (run.read_plan() or {})["code"]["sha256"] == digest
    (copy,) = run.path.glob("own_code*")
    assert copy.name == f"own_code-{digest[:12]}.py"
    assert copy.read_bytes() == code.read_bytes()

    again = resumed("again")
    assert lines(again) == lines(run)
    assert lines(again, "eval_loss") == lines(run, "eval_loss")
    text = "own.temperature is 2, but the run in this folder has None: keep its value"
    assert text in refused("own.temperature=2")
    code.write_bytes(CODE.read_bytes() + b"# changed\n")
    assert "the code has changed (own_code-SHA.py is a copy): name the same" in refused()
    hotter = resumed("hotter", "own.temperature=2", "resume.allow=run.code,own.temperature")
    assert lines(hotter)[2] > 1.02 * lines(run)[2]
    assert lines(hotter, "eval_loss")[0] == lines(run, "eval_loss")[0]
    assert len([*hotter.path.glob("own_code*")]) == 2
    code.write_text("import os\n\n\ndef broken(:\n")
    _, output = trained("broken", *own, code=2)
    assert f"run.code is '{code}' (command line): {code}:4: SyntaxError: invalid syntax" in output
    assert "Traceback" not in output
    assert not (tmp_path / "broken").exists()
    _a_stored_plan_never_runs_code(run, tmp_path)


def _refused(run: RunFolder, *words: str) -> str:
    """Return why a run may not be resumed with these words."""
    command = parse_command([*SHORT_RUN, *words, f"run.dir={run.path}"])
    with pytest.raises(ConfigError) as caught:
        dry_run(plan_from(command, {"DS_ACCELERATOR": "cpu", "WORLD_SIZE": "2", "RANK": "0"}))
    return str(caught.value)


def _a_stored_plan_never_runs_code(run: RunFolder, folder: Path) -> None:
    """Its names are read, also in a process without these rows."""
    marker, planted = folder / "marker", folder / "planted.py"
    planted.write_text(f"open({str(marker)!r}, 'w')")
    plan = run.read_plan() or {}
    plan["run"]["run"]["code"] = plan["code"]["file"] = str(planted)
    plan["settled"]["run.code"] = str(planted)
    run.plan_path.write_text(json.dumps(plan))
    assert recorded_run(plan["run"]).optim.name == "plain_sgd"
    assert show_batch.main([str(run.path), "--step=1", "--json"]) == 0
    assert report.main([str(run.path)]) == 0
    assert export_hf.main([str(run.path), "--out", str(folder / "exported")]) == 0
    assert "run.code is None, but the run in this folder has" in _refused(run, *SMALL_MODEL)
    assert not marker.exists()
    assert not ROWS
    assert "own_code" not in sys.modules
