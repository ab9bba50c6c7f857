"""Builds compiled operators: one process at a time, with progress messages, and safe from kills."""

import fcntl
import functools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CalledProcessError
from typing import IO, Any

from torch.utils import cpp_extension, file_baton

from harness.errors import ConfigError

Say = Callable[[str], None]
PATIENCE_S = 5.0  # before a message explains the delay
# Limits on the compiler output to show, in which one command line has thousands of characters.
TOLD_LINES, TOLD_COLUMNS = 12, 200
_torch: Any = cpp_extension  # untyped, to replace its names
_torch_load = cpp_extension.load


def watch_builds(say: Say) -> None:
    """Report through `say` every operator that is compiled, by this process or another.

    torch compiles silently and uses the existence of a file as a lock: after a kill, every later
    run on the machine would wait forever for that file to be removed.
    """
    _torch.load = functools.partial(_load, say)
    _torch.FileBaton = _BuildLock


def _load(say: Say, name: str, *args: Any, **kwargs: Any) -> Any:
    """Wrap torch's `load`. Raises ConfigError with the compiler's last lines if the build fails."""
    folder = kwargs.get("build_directory") or cpp_extension._get_build_directory(name, False)
    # An operator that is already built loads at once, unless another installation built it.
    teller = _BuildLog(say, PATIENCE_S if Path(folder, f"{name}.so").exists() else 0)
    teller(f"compiling DeepSpeed's {name} in {folder}: takes some minutes, once per machine")
    _torch.FileBaton = functools.partial(_BuildLock, say=teller)
    began = time.monotonic()
    try:
        module = _torch_load(name, *args, **kwargs)
    except (RuntimeError, ImportError, OSError, CalledProcessError) as error:
        output = getattr(error, "output", None) or b""  # if the compiler does not even start
        output_text = f"{error}\n{output.decode(errors='replace')}"
        raise ConfigError(
            f"DeepSpeed's {name} could not be built in {folder} (set CXX to use another compiler, "
            f"TORCH_EXTENSIONS_DIR to use another folder). Last lines of the compiler output:\n"
            f"{_last_lines(output_text)}"
        ) from error
    finally:
        _torch.FileBaton = _BuildLock
        teller.stop()
    if teller.has_told:
        say(f"{name} was ready after {time.monotonic() - began:.0f} s")
    return module


class _BuildLog:
    """Reports the current activity if it takes longer than `after_s` seconds."""

    def __init__(self, say: Say, after_s: float) -> None:
        self._say, self._after_s, self._timer = say, after_s, threading.Timer(0, lambda: None)
        self.has_told = False

    def __call__(self, text: str) -> None:
        self.stop()
        if self._after_s:
            self._timer = threading.Timer(self._after_s, self._tell, [text])
            self._timer.daemon = True
            self._timer.start()
        else:
            self._tell(text)

    def stop(self) -> None:
        """Cancel the pending message."""
        self._timer.cancel()

    def _tell(self, text: str) -> None:
        self.has_told = True
        self._say(text)


def _last_lines(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(f"  {line[:TOLD_COLUMNS]}" for line in lines[-TOLD_LINES:])


class _BuildLock:
    """A replacement for torch's FileBaton that uses a kernel lock, released when the process ends.

    A process that has waited builds, too: a killed builder has built nothing, and after a finished
    build ninja has nothing to do.
    """

    def __init__(self, lock_file_path: str, say: Say = lambda text: None) -> None:
        self._path, self._say = Path(lock_file_path), say
        self._file: IO[str] | None = None

    def try_acquire(self) -> bool:
        """Return False if another process builds and the file system has no locks."""
        while True:
            try:
                file, is_new = self._path.open("x"), True
            except FileExistsError:
                try:
                    file, is_new = self._path.open("r+"), False
                except FileNotFoundError:  # its holder has just released it
                    continue
            try:
                self._lock(file)
            except OSError:  # Lustre without -o flock: as in torch, the file itself is the lock
                if not is_new:
                    file.close()
                    return False
            if self._is_in_place(file):
                self._file = file
                return True
            file.close()  # removed while this process waited: others lock a new file

    def wait(self) -> None:
        """Wait for the process that builds, as torch does."""
        self._say(f"waiting for another process to build, until {self._path} is removed")
        file_baton.FileBaton(str(self._path)).wait()

    def release(self) -> None:
        """Release the lock so that others can build."""
        assert self._file is not None, "release without acquire"
        self._path.unlink(missing_ok=True)
        self._file.close()

    def _lock(self, file: IO[str]) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._say(f"waiting for another process that is building in {self._path.parent}")
            fcntl.flock(file, fcntl.LOCK_EX)

    def _is_in_place(self, file: IO[str]) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False
