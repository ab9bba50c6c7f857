import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.config.data_section import DataConfig
from harness.config.run_config import RunConfig
from harness.data.batch_text import MOST_TOKENS, MOST_WINDOWS, _text, show_step
from harness.data.build import build_data
from harness.data.data import Data
from harness.data.spec import DataSpec
from harness.plan.command import parse_command, plan_from
from harness.run.dry_run import dry_run


def test_it_shows_what_is_trained_on(library: Data) -> None:
    shown = f"{show_step(library, step=3, global_batch=4, first=8, ids=True)}\n"
    batch = library.train.batch(8, 4)
    start = "step 3: windows 8 to 11, 512 of 512 tokens are learned, in «»; data "
    assert shown.startswith(start)
    for ids, labels in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True):
        assert f"ids       {' '.join(map(str, ids))}\n" in shown
        assert f"targets   {' '.join(map(str, labels))}\n" in shown
    for index in range(8, 12):
        spans = library.train.sample(index).spans
        assert f"window {index}: {len(spans)} example" in shown
        for span in spans:
            name = library.sources[0].corpus.name_of(span.document)
            assert name.endswith(".py")
            assert f"  example {span.document} [{span.first}:{span.last}] {name}" in shown


def test_it_is_short_unless_all_is_asked_for(library: Data) -> None:
    short = show_step(library, step=1, global_batch=12, first=0, whole=False)
    assert short.count("\nwindow ") == MOST_WINDOWS
    assert short.endswith("8 more windows: --all; token ids and targets: --ids")
    assert "  ids  " not in short
    whole = show_step(library, step=1, global_batch=12, first=0)
    assert whole.count("\nwindow ") == 12
    assert "more windows" not in whole
    tokens = [*range(3, 10 + 2 * MOST_TOKENS)]
    learned = [(token, True) for token in tokens]
    assert " ... 7 tokens ... " in _text(library.tokenizer, learned, False, False)
    decoded = repr(library.tokenizer.decode(tokens))[1:-1]
    assert _text(library.tokenizer, learned, False, True) == f"«{decoded}»"


def test_targets_are_marked(tmp_path, write_jsonl: Callable[..., Path], tokenizer_dir: str) -> None:
    path = write_jsonl(*({"prompt": "ab" + " ab" * 9, "completion": " c"} for _ in range(8)))
    spec = DataSpec(
        DataConfig(
            path=str(path),
            tokenizer=tokenizer_dir,
            seq_len=8,
            cache_dir=str(tmp_path),
            held_out=0.3,
            packing="stream",
        )
    )
    data = build_data(spec)
    shown = show_step(data, step=1, global_batch=2, first=0, ids=True)
    assert "targets   - -" in shown
    assert "positions 0 1" in shown
    # Without the green parts, nothing remains that is trained on.
    colored = show_step(data, step=1, global_batch=8, first=0, color=True)
    green = re.findall(r"\033\[32m(.*?)\033\[0m", colored)
    batch = data.train.batch(0, 8)
    learned = batch.labels[batch.labels != -100].tolist()
    assert "".join(green) == repr(data.tokenizer.decode(learned))[1:-1]
    assert "ab" not in "".join(green)
    marked = show_step(data, step=1, global_batch=8, first=0)
    assert re.findall(r"«(.*?)»", marked.partition("\n")[2]) == green
    # Read as two sequences each, positions restart in the second: none is larger than 3.
    pieces = show_step(data, step=1, global_batch=2, first=0, pieces=2, ids=True)
    lines = [line.split()[1:] for line in pieces.splitlines() if line.startswith("  positions")]
    assert [max(map(int, line)) for line in lines] == [3, 3]
    assert all(line[4] == "0" for line in lines)


def test_the_command_needs_the_run_folder_alone(
    library: Data,
    cache_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = RunConfig.model_validate(
        {"data": {"cache_dir": str(cache_dir)}, "train": {"global_batch": 4}}
    )
    plan = {
        "run": run.model_dump(mode="json"),
        "model_config": {"vocab_size": 8192},
        "global_batch": 4,
        "data_fingerprint": library.fingerprint,
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    monkeypatch.setattr(sys, "path", [*sys.path])  # as a script, it replaces the first entry
    main = importlib.import_module("tools.show_batch").main
    assert main([str(tmp_path)]) == 0  # the first step, shortened
    assert capsys.readouterr().out == show_step(library, 1, 4, 0, whole=False) + "\n"
    assert main([str(tmp_path), "--step", "3", "--all", "--ids"]) == 0
    assert capsys.readouterr().out == show_step(library, 3, 4, 8, ids=True) + "\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for no_color, color in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", no_color)
        assert main([str(tmp_path), "--step", "3", "--all"]) == 0
        assert capsys.readouterr().out == show_step(library, 3, 4, 8, color=color) + "\n"
    assert "\033[32m" in show_step(library, 3, 4, 8, color=True)
    plan["data_fingerprint"] = "0" * 64
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert main([str(tmp_path), "--step", "3"]) == 2
    assert "the data has changed since the run" in capsys.readouterr().err
    for arguments, message in (
        ([str(tmp_path / "none"), "--step", "1"], "has no plan.json"),
        ([str(tmp_path), "--step", "0"], "steps count from 1"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        assert message in capsys.readouterr().err


def test_dry_run_shows_rows_of_sources(tmp_path: Path, write_jsonl: Callable[..., Path]) -> None:
    """In their order, held-out ones included, as they would be learned; nothing is written."""
    pairs = ({"prompt": f"q{n} ", "completion": f"answer {n} " * 9} for n in range(30))
    texts = ({"text": f"plain text {n} " * 30} for n in range(30))
    paths = {"a": write_jsonl(*pairs), "b": write_jsonl(*texts, name="texts.jsonl")}
    mix = ", ".join(f'{{path="{path}", name="{name}"}}' for name, path in paths.items())
    before = {*tmp_path.rglob("*")}
    command = parse_command(["--dry-run", "--show=2", f"data.mix=[{mix}]", "data.held_out=0.4"])
    seen = dry_run(plan_from(command, {"DS_ACCELERATOR": "cpu"}), show=command.show)
    assert {*tmp_path.rglob("*")} == before
    names = [heading.partition(" [")[0] for heading in seen.examples]
    assert names == ["a: example 0", "a: example 1", "b: example 0", "b: example 1"]
    pair, text, *_ = re.findall(r"^  (q0.*|plain« text 0 .*)$", seen.text(), re.MULTILINE)
    assert re.fullmatch("q0.{0,2}«.*»", pair)
    assert text.count("«") == 1
    parts = next(iter(seen.to_json()["examples"].values()))
    assert [is_learned for _, is_learned in parts] == [False, True]
    assert "".join(part for part, _ in parts).startswith("q0 answer 0")
