"""Checkpoint folders: recognition, retention and deletion; ranks share the verification."""

import errno
from pathlib import Path
from unittest import mock

import pytest
import torch

from harness.checkpoint import manifest as manifests
from harness.checkpoint import save as saving
from harness.checkpoint import store
from harness.checkpoint.index import INDEX, WEIGHT
from harness.checkpoint.manifest import PROBE, Written, check_size, sha256_of
from harness.checkpoint.store import Retention, Store
from harness.checkpoint.tensor_file import Fragment
from harness.errors import CannotSave, RunStopped, Unusable
from harness.layout.box import Part
from tests.checkpoint.small import save, save_of_ranks
from tests.thread_ranks import Group


def names(folder: Path) -> list[str]:
    return [path.name for path in Store(folder).all()]


def steps(folder: Path) -> list[int]:
    return [int(name.removeprefix("step-")) for name in names(folder)]


def test_retention_keeps_the_newest_checkpoints(tmp_path: Path) -> None:
    for step in (9, 10, 11):
        removed = save(tmp_path, step, Retention(last=2)).removed
    assert steps(tmp_path) == [10, 11]
    assert removed == ["step-00000009"]
    assert (tmp_path / "latest").read_text() == "step-00000011\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", *names(tmp_path)]


def test_retention_keeps_multiples_and_best_checkpoint(tmp_path: Path) -> None:
    keep = Retention(last=1, every=4, best=True)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 2.5), (5, None), (6, 2.0)):
        save(tmp_path, step, keep, loss)
    assert steps(tmp_path) == [2, 4, 6]


def test_a_damaged_checkpoint_counts_for_nothing_and_stays(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "step-00000002" / "index.json").unlink()
    save(tmp_path, 3, Retention(last=2))
    assert steps(tmp_path) == [1, 2, 3]
    save(tmp_path, 4, Retention(last=2))
    assert steps(tmp_path) == [2, 3, 4]


def test_unreadable_old_checkpoint_does_not_end_a_save(tmp_path: Path) -> None:
    keep = Retention(last=1)
    save(tmp_path, 1, keep)
    error = OSError(errno.EIO, "Input/output error")
    for step, (of, name) in enumerate(((store, "read_manifest"), (Store, "retain")), 2):
        with mock.patch.object(of, name, side_effect=error):
            save(tmp_path, step, keep)
    assert steps(tmp_path) == [1, 2, 3]


def test_rolled_back_checkpoints_displace_no_others(tmp_path: Path) -> None:
    """Its sizes may be correct although its bytes are not."""
    for step in (1, 2, 4):
        save(tmp_path, step)
    assert save(tmp_path, 3, Retention(last=1)).removed == ["step-00000001", "step-00000002"]
    assert steps(tmp_path) == [3, 4]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    first = save(tmp_path, 1).path
    (first / "index.json").write_text("damaged")
    again = save(tmp_path, 1).path
    assert again == first
    assert (again / "index.json").read_text() != "damaged"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]


def test_leftovers_of_killed_saves_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".unfinished-step-00000007").mkdir(parents=True)
    (tmp_path / ".unfinished-step-00000007" / "rank-00000-000.safetensors").write_text("half")
    save(tmp_path, 8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000008"]


def test_a_leftover_that_cannot_be_removed_ends_no_run(tmp_path: Path) -> None:
    """NFS keeps the name of a removed file that another process has open."""
    save(tmp_path, 1)
    left = tmp_path / ".unfinished-step-00000000-removed"
    left.mkdir()
    with mock.patch("os.rmdir", side_effect=OSError(errno.ENOTEMPTY, "Directory not empty")):
        Store(tmp_path).make_unfinished(2)
    assert left.exists()


@pytest.mark.parametrize(
    "name", ["step-1", "step-00000001x", "step-0000000\u0661", ".step-00000001"]
)
def test_store_ignores_folders_of_other_names(tmp_path: Path, name: str) -> None:
    assert Store(tmp_path / "none").all() == []
    (tmp_path / name).mkdir()
    assert Store(tmp_path).all() == []


def test_files_and_folders_are_synced_around_the_rename(tmp_path, synced: list[Path]) -> None:
    """The run's records are synced once the checkpoint is on disk and before it gets its name."""
    save(tmp_path, 3, before_publishing=lambda: synced.extend(tmp_path.iterdir()))
    unfinished = tmp_path / ".unfinished-step-00000003"
    assert synced[-5:] == [
        *(unfinished / "manifest.json", unfinished, unfinished, tmp_path, tmp_path / ".latest")
    ]
    names = ("index.json", "probe.safetensors", "rank-00000-000.safetensors")
    assert sorted(synced[:-5]) == [unfinished / name for name in names]


def test_checkpoint_gets_no_name_if_records_cannot_be_synced(tmp_path: Path) -> None:
    def fails() -> None:
        raise CannotSave("metrics.jsonl cannot be written")

    with pytest.raises(RunStopped, match=r"metrics\.jsonl cannot be written") as stop:
        save(tmp_path, 3, before_publishing=fails)
    assert stop.value.code == 74
    assert list(tmp_path.iterdir()) == []


def test_save_needs_room_for_the_files_of_all_ranks(tmp_path, monkeypatch) -> None:
    """A rank has 792 bytes."""
    monkeypatch.setattr(saving, "gather_objects", lambda own: [own, own])
    monkeypatch.setattr(Store, "free_bytes", lambda self: 2 * 792 - 1)
    with pytest.raises(RunStopped, match=r"it needs .*, but only .* are free") as stop:
        save(tmp_path, 3)
    assert stop.value.code == 74
    assert list(tmp_path.iterdir()) == []


def test_kept_checkpoints_are_looked_at_once_until_a_name_goes(tmp_path: Path) -> None:
    """A thousand ranks have a thousand files each, and the ranks wait for rank 0."""
    store = Store(tmp_path)
    looked = []
    for step in (1, 2, 3, 4):
        save(tmp_path, step, Retention(last=9))

    def look(folder: Path, file: Written) -> None:
        looked.append(folder.name)
        check_size(folder, file)

    with mock.patch.object(manifests, "check_size", look):
        store.retain(Retention(last=9), newest=4)
        assert {*looked} == {"step-00000001", "step-00000002", "step-00000003"}
        looked.clear()
        store.retain(Retention(last=9), newest=4)
        assert looked == []
        (store.at(2) / "index.json").unlink()
        assert store.retain(Retention(last=2), newest=4) == [store.at(1)]
        assert {*looked} == {"step-00000002"}
    assert steps(tmp_path) == [2, 3, 4]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return the checkpoint of two ranks."""
    whole = Fragment("w", Part.of((6,)), 0, {WEIGHT: torch.arange(6.0), "exp_avg": torch.ones(6)})
    return save_of_ranks(tmp_path, 3, [whole.narrow(0, 3), whole.narrow(3, 3)])


def looked_at(folder: Path, ranks: int) -> list[set[str]]:
    """Return the files that each rank looks up and hashes."""
    group, seen = Group(ranks), [set[str]() for _ in range(ranks)]

    def looks(_: Path, file: Written) -> None:
        seen[group.get_rank()].add(file.name)

    def hashes(path: Path) -> str:
        assert path.name in seen[group.get_rank()]
        return sha256_of(path)

    with (
        mock.patch.object(store, "check_size", looks),
        mock.patch.object(store, "sha256_of", hashes),
    ):
        group.run(lambda rank: store.verified(folder))
    return seen


def test_every_rank_checks_what_it_wrote_and_rank_0_the_index(checkpoint: Path) -> None:
    of_rank_0 = {"rank-00000-000.safetensors", PROBE, INDEX}
    of_rank_1 = {"rank-00001-000.safetensors"}
    assert looked_at(checkpoint, 1) == [of_rank_0 | of_rank_1]
    assert looked_at(checkpoint, 2) == [of_rank_0, of_rank_1]
    assert looked_at(checkpoint, 3) == [of_rank_0, of_rank_1, set()]


def test_verification_error_of_one_rank_reaches_all_ranks(checkpoint: Path) -> None:
    (checkpoint / "rank-00001-000.safetensors").unlink()

    def problem(rank: int) -> str:
        with pytest.raises(Unusable) as caught:
            store.verified(checkpoint)
        return str(caught.value)

    problems = Group(3).run(problem)
    assert problems == [f"{checkpoint / 'rank-00001-000.safetensors'} is not there"] * 3
