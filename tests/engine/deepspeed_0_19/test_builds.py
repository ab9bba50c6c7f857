"""Compiled operators: who builds, who waits, and the message of a failed build."""

import errno
import fcntl
import threading
import time
from pathlib import Path

import pytest

from harness.engine.deepspeed_0_19 import builds
from harness.engine.deepspeed_0_19.builds import _BuildLock
from harness.errors import ConfigError
from tests.real_runs import REPOSITORY, run_ranks, train_command

STARTS_NOT = "echo 'planted.h:1: error: nothing works' >&2; exit 1"
# Only flags show that a command compiles: paths may contain any word.
COMPILES_NOT = f'case " $* " in *" -c "*) {STARTS_NOT};; *) exec c++ "$@";; esac'


def compiler(folder: Path, script: str) -> str:
    """Write a c++ that runs a script instead of compiling."""
    folder.mkdir()
    path = folder / "c++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def source(folder: Path) -> Path:
    path = folder / "planted.cpp"
    path.write_text('extern "C" int planted() { return 1; }\n')
    return path


def test_op_build_waits_on_the_lock_of_others(tmp_path: Path) -> None:
    """The last holder removes the file: a lock on the removed file would exclude nobody."""
    path = tmp_path / "lock"
    first, second, waits = _BuildLock(str(path)), _BuildLock(str(path)), threading.Event()
    second._say = lambda text: waits.set()
    assert first.try_acquire()
    thread = threading.Thread(target=second.try_acquire)
    thread.start()
    assert waits.wait(60)
    first.release()
    thread.join(60)
    with path.open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    second.release()
    assert not path.exists()


def test_op_build_without_locks_uses_the_lock_file(tmp_path, monkeypatch) -> None:
    def unknown(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unknown)
    first, second = (_BuildLock(str(tmp_path / "lock")) for _ in range(2))
    assert first.try_acquire()
    assert not second.try_acquire()
    first.release()
    second.wait()
    assert second.try_acquire()


@pytest.mark.parametrize("script", [STARTS_NOT, COMPILES_NOT])
def test_a_failed_build_is_told_in_the_compilers_words(script: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path / "bin", script))
    build = {"build_directory": str(tmp_path), "is_python_module": False}
    said: list[str] = []
    with pytest.raises(ConfigError, match="nothing works") as caught:
        builds._load(said.append, name="planted", sources=[str(source(tmp_path))], **build)
    assert max(map(len, str(caught.value).splitlines())) < 400
    assert len(said) == 1


@pytest.mark.gate("engine")
@pytest.mark.slow
def test_a_broken_compiler_ends_a_run_with_code_2(tmp_path: Path, data: list[str]) -> None:
    cxx = compiler(tmp_path / "bin", COMPILES_NOT)
    json = REPOSITORY / "ds_configs" / "zero2_offload.json"
    command = train_command(f"--deepspeed={json}", *data, f"run.dir={tmp_path / 'run'}")
    variables = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"), "CXX": cxx}
    ended = run_ranks(command, tmp_path / "logs", env=variables)
    assert ended.codes == [2, 2], ended.output
    assert "Traceback" not in ended.output
    first, second = ended.outputs
    assert "compiling DeepSpeed's cpu_adam" in first
    assert "compiling DeepSpeed's" not in second
    for output in ended.outputs:
        assert "offload_optimizer needs DeepSpeed's compiled CPU Adam" in output
        assert "planted.h:1: error: nothing works" in output
    assert not (tmp_path / "run").exists()


def test_built_op_is_loaded_silently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another installation may have built it: then it is rebuilt, with a message."""
    monkeypatch.setattr(builds, "PATIENCE_S", 0.05)
    (tmp_path / "there.so").touch()
    said: list[str] = []
    for seconds in (0.0, 1.0):
        monkeypatch.setattr(builds, "_torch_load", lambda *_, s=seconds, **__: time.sleep(s))
        builds._load(said.append, name="there", build_directory=str(tmp_path))
        assert [text.split()[0] for text in said] == (["compiling", "there"] if seconds else [])
