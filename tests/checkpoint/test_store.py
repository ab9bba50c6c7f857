"""Checkpoints of a run folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.checkpoint.store import CheckpointStore, TrainState

LAYOUT = {"world_size": 2, "zero_stage": 1}


def store(folder: Path, **layout: int) -> CheckpointStore:
    return CheckpointStore(folder, 0, lambda: None, {**LAYOUT, **layout})


def save(folder: Path, step: int, keep: int = 3) -> Path:
    def write(path: str) -> None:
        Path(path, "engine.bin").write_text(f"engine at {step}")

    return store(folder).save(TrainState(step, 8 * step, 64 * step), write, keep)


def test_the_newest_checkpoint_comes_back_with_its_state(tmp_path: Path) -> None:
    save(tmp_path, 9)
    path = save(tmp_path, 10)
    assert store(tmp_path).newest() == (path, TrainState(10, 80, 640))
    assert (path / "engine.bin").read_text() == "engine at 10"


def test_an_empty_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert store(tmp_path / "none").newest() is None


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=2)
    assert [path.name for path in store(tmp_path).all()] == ["step-00000003", "step-00000004"]


def test_a_save_that_was_killed_is_no_checkpoint_and_is_swept(tmp_path: Path) -> None:
    whole = save(tmp_path, 1)

    def killed(path: str) -> None:
        Path(path, "engine.bin").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store(tmp_path).save(TrainState(2), killed, keep=3)
    newest = store(tmp_path).newest()
    assert newest is not None
    assert newest[0] == whole
    save(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = store(tmp_path).save(TrainState(1), lambda _: None, keep=3)
    assert not (path / "engine.bin").exists()


def test_another_layout_is_refused_with_both_values(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(ValueError, match="zero_stage was 1, is 3"):
        store(tmp_path, zero_stage=3).newest()


def test_the_state_counts_samples_and_tokens() -> None:
    assert TrainState().after(8, 32).after(8, 32) == TrainState(2, 16, 512)
