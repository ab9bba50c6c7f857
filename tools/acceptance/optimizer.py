"""The optimizer: every AdamW that is here takes torch's steps; a killed build does not matter."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from harness.launch.ranks import REPOSITORY, environment
from tools.acceptance.bench import Bench, Failed, Skipped, expect, tail
from tools.acceptance.building import LOADED, SOURCE

_ELEMENTS = 10_000_000
_ALLOWED = 1e-6  # of a weight below 1, after three steps of 0.001
_PATIENCE_S = 300.0


def look(bench: Bench) -> str:
    """Compare the implementations; then kill a build for which another one waits."""
    out = bench.folder / "apart.json"
    results: dict[str, float | str] = {}

    def stepped() -> str:
        arguments = [str(out), str(_ELEMENTS)]
        ended = bench.run("tools.acceptance.stepping", arguments, "stepping", ranks=1)
        expect(ended.codes == [0], f"it ended with {ended.codes}: {tail(ended)}")
        result = json.loads(out.read_text())
        results.update(result["apart"])
        bench.values["engine"] = result["engine"]
        return f"a run of zero1.json here has {result['engine']}"

    bench.check("three steps by each", stepped)
    bench.values["apart"] = results
    for name, apart in results.items():
        bench.check(f"AdamW, {name}", lambda apart=apart: _close(apart))
    bench.check("a build that is killed", lambda: _killed_build(bench.folder))
    numbers = [apart for apart in results.values() if isinstance(apart, float)]
    most = f", at most {max(numbers):.0e} apart" if numbers else ""
    return f"{bench.values.get('engine', 'none')} in a run{most}"


def _close(apart: float | str) -> str:
    if isinstance(apart, str):  # runs then take torch's, with an event
        raise Skipped(f"not built here: {apart}")
    text = f"{apart:.1e} apart, {_ALLOWED:.0e} is allowed"
    expect(apart <= _ALLOWED, text)
    return text


def _killed_build(folder: Path) -> str:
    """Let a build wait for one that never ends, kill that, and see the waiting one build."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise Skipped("needs a C++ compiler")
    own = folder / "build"
    own.mkdir()
    begun, slow, source = own / "begun", own / "slow-c++", own / "planted.cpp"
    source.write_text(SOURCE)
    # Of a command only its flags say that it compiles.
    waits = f"case \" $* \" in *' -c '*) touch '{begun}'; sleep 3600;; esac"
    slow.write_text(f"#!/bin/sh\n{waits}\nexec '{compiler}' \"$@\"\n")
    slow.chmod(0o755)
    log = own / "second.log"
    first = _builder(own, str(slow), source, own / "first.log")
    _until(begun.exists, "the first build to begin", first)
    second = _builder(own, compiler, source, log)
    _until(lambda: "waiting for another" in log.read_text(), "the second to wait", second)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    code = second.wait(_PATIENCE_S)
    expect(code == 0 and LOADED in log.read_text(), f"it ended with {code}: {log.read_text()}")
    return "whoever waited for it has built"


def _builder(folder: Path, compiler: str, source: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tools.acceptance.building", str(source)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    env = environment({"CXX": compiler, "TORCH_EXTENSIONS_DIR": str(folder), "PATH": path})
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _until(condition: Callable[[], bool], what: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise Failed(f"waited for {what}, in vain")
        time.sleep(0.1)
