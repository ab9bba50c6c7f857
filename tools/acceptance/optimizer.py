"""The optimizer: every AdamW takes the same steps as torch's, and a killed build does no harm."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from harness.launch.ranks import REPOSITORY, Ranks, started
from tools.acceptance.bench import Bench, Failed, Skipped, expect, on_rank, tiny_engine

_ELEMENTS = 10_000_000
_ALLOWED = 1e-6  # of a weight below 1, after three steps of 0.001
_PATIENCE_S = 300.0
_STEPS = 3
_SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
_SOURCE = 'extern "C" int planted() { return 1; }\n'
_LOADED = "loaded"
# Waits for another build of the operator, builds it if necessary and loads it, like DeepSpeed's.
_BUILD = f"""
import sys
from torch.utils import cpp_extension
from harness.engine.deepspeed_0_19.builds import watch_builds
watch_builds(lambda text: print(text, flush=True))
cpp_extension.load(name="planted", sources=[sys.argv[1]], is_python_module=False)
print({_LOADED!r}, flush=True)
"""


def look(bench: Bench) -> str:
    """Compare the implementations; then kill a build for which another one waits."""
    results: dict[str, float | str] = {}

    def stepped() -> str:
        result = bench.computed(__name__, "stepping", str(_ELEMENTS))
        results.update(result["apart"])
        bench.values["engine"] = result["engine"]
        return f"a run of zero1.json here has {result['engine']}"

    bench.check("three steps by each", stepped)
    bench.values["apart"] = results
    for name, apart in results.items():
        bench.check(f"AdamW, {name}", _close, apart)
    bench.check("a build that is killed", _killed_build, bench.folder / "build")
    numbers = [apart for apart in results.values() if isinstance(apart, float)]
    most = f", at most {max(numbers):.0e} apart" if numbers else ""
    return f"{bench.values.get('engine', 'none')} in a run{most}"


def _close(apart: float | str) -> str:
    if isinstance(apart, str):  # runs then use torch's, with an event
        raise Skipped(f"not available here: {apart}")
    text = f"{apart:.1e} apart, {_ALLOWED:.0e} is allowed"
    expect(apart <= _ALLOWED, text)
    return text


def _killed_build(own: Path) -> str:
    """Let a build wait for one that never ends, kill that one, and expect the other to succeed."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise Skipped("needs a C++ compiler")
    own.mkdir()
    begun, slow, source = own / "begun", own / "slow-c++", own / "planted.cpp"
    source.write_text(_SOURCE)
    # Only its flags show that a command compiles.
    waits = f"case \" $* \" in *' -c '*) touch '{begun}'; sleep 3600;; esac"
    slow.write_text(f"#!/bin/sh\n{waits}\nexec '{compiler}' \"$@\"\n")
    slow.chmod(0o755)
    with _builder(own / "first", str(slow), source) as first:  # ends the compiler that it leaves
        _until(begun.exists, "the first build to begin", first)
        with _builder(own / "second", compiler, source) as second:
            (log,) = second.logs
            _until(lambda: "waiting for another" in log.read_text(), "the second to wait", second)
            os.killpg(first.processes[0].pid, signal.SIGKILL)
            ended = second.wait(_PATIENCE_S)
    is_built = ended.codes == [0] and ended.last_line == _LOADED
    expect(is_built, f"it ended with {ended.codes[0]}: {ended.output}")
    return "the build that waited for it succeeded"


def _builder(logs: Path, compiler: str, source: Path) -> AbstractContextManager[Ranks]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    env = {"CXX": compiler, "TORCH_EXTENSIONS_DIR": str(source.parent), "PATH": path}
    return started([sys.executable, "-c", _BUILD, str(source)], None, REPOSITORY, logs, env)


def _until(condition: Callable[[], bool], what: str, builder: Ranks) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        if builder.ended or time.monotonic() > deadline:
            raise Failed(f"waited for {what}, in vain")
        time.sleep(0.1)


# --- one rank: OUT ELEMENTS ---


def main(argv: list[str]) -> int:
    """Write each implementation's largest weight difference, or why it is missing, to OUT.

    The reference is torch's AdamW in fp64, one operation at a time.
    """
    import torch

    out, elements = argv

    def stepped(make: Callable[..., Any], how: dict[str, bool], device: Any, dtype: Any) -> Any:
        generator = torch.Generator().manual_seed(0)
        values = torch.rand(int(elements), generator=generator)
        weight = torch.nn.Parameter(values.to(device, dtype))
        optimizer = make([weight], **_SETTINGS, **how)
        for _ in range(_STEPS):
            weight.grad = torch.randn(int(elements), generator=generator).to(device, dtype)
            optimizer.step()
        return weight.detach()

    def computed(world: Any, device: Any) -> dict[str, Any]:
        from deepspeed.ops import adam

        compiled = adam.FusedAdam if device.type == "cuda" else adam.DeepSpeedCPUAdam
        torchs, apart = torch.optim.AdamW, {}
        engine = tiny_engine(world, device, 32)
        inner = str(engine.describe()["inner_optimizer"])  # of a run of zero1.json
        engine.close()
        expected = stepped(torchs, {}, device, torch.float64)
        for name, make, how in (
            ("torch's, fused", torchs, {"fused": True}),
            ("torch's, foreach", torchs, {"foreach": True}),
            ("DeepSpeed's, compiled", compiled, {}),
        ):
            try:
                weights = stepped(make, how, device, torch.float32)
                apart[name] = float((weights.double() - expected).abs().max())
            except Exception as error:  # whatever a build raises
                apart[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        return {"engine": inner, "apart": apart}

    return on_rank(out, computed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
