"""Builds of compiled operators: by one process at a time, announced, and safe from a kill."""

from __future__ import annotations

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
PATIENCE_S = 5.0  # until a line says why nothing happens
TOLD_LINES, TOLD_COLUMNS = 12, 200  # of a compiler's output; a command alone has thousands
_torch: Any = cpp_extension  # whose names are replaced
_torch_load = cpp_extension.load


def watch_builds(say: Say) -> None:
    """Let `say` hear of every operator that is compiled, here or by another process.

    torch compiles without a word, and takes the presence of a file for a lock: after a kill every
    later run on the machine waits for it to vanish, for ever.
    """
    _torch.load = functools.partial(_load, say)
    _torch.FileBaton = _Baton


def _load(say: Say, name: str, *args: Any, **kwargs: Any) -> Any:
    """torch's `load`. Raises ConfigError with the compiler's last lines where it fails."""
    folder = kwargs.get("build_directory") or cpp_extension._get_build_directory(name, False)
    # One that was built is there at once, unless another installation built it.
    teller = _Teller(say, PATIENCE_S if Path(folder, f"{name}.so").exists() else 0)
    teller(f"compiling DeepSpeed's {name} in {folder}: some minutes, the first time on a machine")
    _torch.FileBaton = functools.partial(_Baton, say=teller)
    began = time.monotonic()
    try:
        module = _torch_load(name, *args, **kwargs)
    except (RuntimeError, ImportError, OSError, CalledProcessError) as error:
        output = getattr(error, "output", None) or b""  # of a compiler that does not even start
        output_text = f"{error}\n{output.decode(errors='replace')}"
        raise ConfigError(
            f"DeepSpeed's {name} could not be built in {folder} (CXX names another compiler, "
            f"TORCH_EXTENSIONS_DIR another folder). The last lines of what the compiler said:\n"
            f"{_last_lines(output_text)}"
        ) from error
    finally:
        _torch.FileBaton = _Baton
        teller.stop()
    if teller.has_told:
        say(f"{name} was ready after {time.monotonic() - began:.0f} s")
    return module


class _Teller:
    """Says what is being done if it is still being done after so many seconds."""

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
        """Say no more."""
        self._timer.cancel()

    def _tell(self, text: str) -> None:
        self.has_told = True
        self._say(text)


def _last_lines(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(f"  {line[:TOLD_COLUMNS]}" for line in lines[-TOLD_LINES:])


class _Baton:
    """torch's FileBaton, held by the kernel, which lets go of it with the process.

    Whoever waited builds, too: a builder that was killed has built nothing, and after one that was
    not, ninja finds nothing to do.
    """

    def __init__(self, lock_file_path: str, say: Say = lambda text: None) -> None:
        self._path, self._say = Path(lock_file_path), say
        self._file: IO[str] | None = None

    def try_acquire(self) -> bool:
        """True once this process may build; False where another one does, and locks are unknown."""
        while True:
            try:
                file, is_new = self._path.open("x"), True
            except FileExistsError:
                try:
                    file, is_new = self._path.open("r+"), False
                except FileNotFoundError:  # its holder has just let go
                    continue
            try:
                self._lock(file)
            except OSError:  # Lustre without -o flock: as torch does, by the file being there
                if not is_new:
                    file.close()
                    return False
            if self._is_in_place(file):
                self._file = file
                return True
            file.close()  # it was removed while we waited: others lock a new one

    def wait(self) -> None:
        """Wait for whoever builds, as torch does."""
        self._say(f"waiting for another process to build, while {self._path} is there")
        file_baton.FileBaton(str(self._path)).wait()

    def release(self) -> None:
        """Let others build."""
        assert self._file is not None, "release without acquire"
        self._path.unlink(missing_ok=True)
        self._file.close()

    def _lock(self, file: IO[str]) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._say(f"waiting for another process, which builds in {self._path.parent}")
            fcntl.flock(file, fcntl.LOCK_EX)

    def _is_in_place(self, file: IO[str]) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False
