"""The bench of a step: starts ranks, provides a model and data for them, and collects checks."""

import contextlib
import importlib
import json
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.config.run_config import RunConfig
from harness.errors import ExitCode
from harness.launch.fork_server import Zygote
from harness.launch.ranks import ON_CUDA, REPOSITORY, Outcome, environment, started
from harness.layout.world import World, ranks_per_gpu
from harness.plan.make import make_plan
from harness.runfolder import RunFolder
from tools.acceptance.report import Check, readable

NEEDS_CUDA = "needs CUDA"
NEEDS_TWO = "needs two ranks"
_PATIENCE_S = 90.0  # ranks that outlive a failed one by more than this hang
# A Llama of about a million parameters, most of them of 8,192 tokens, for CPU ranks.
_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


class Failed(Exception):
    """A check failed."""


class Skipped(Exception):
    """A check cannot be made here; the text says what it needs."""


@dataclass
class Bench:
    """One step, which works in `folder`. `shared`: a folder that all steps use."""

    folder: Path
    shared: Path
    ranks: int
    accelerator: str
    limit_s: float = math.inf  # after which the process of this step is ended
    checks: list[Check] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)  # measurements, for programs
    began: float = field(default_factory=time.monotonic)
    _zygote: Zygote | None = None

    @property
    def on_cuda(self) -> bool:
        """True on GPUs."""
        return self.accelerator == "cuda"

    @property
    def sharing(self) -> int:
        """The most ranks that share a GPU."""
        return ranks_per_gpu(self.ranks) if self.on_cuda else 1

    @property
    def power_of_two(self) -> int:
        """The most ranks that are a power of two, which divide every batch of this tool."""
        return 2 ** int(math.log2(self.ranks))

    def say(self, text: str) -> None:
        """Show what the step is doing, in its log and on the progress line."""
        (self.folder / "now").write_text(text, encoding="utf-8")
        print(text, flush=True)

    def check(self, name: str, look: Callable[..., str], *arguments: Any) -> None:
        """Add a check: `look` returns what it measured, or raises Skipped, Failed or any error."""
        self.say(name)
        try:
            check = Check(name, "held", look(*arguments))
        except Skipped as skipped:
            check = Check(name, "skipped", str(skipped))
        except Failed as failed:
            check = Check(name, "failed", str(failed))
        except Exception as error:
            traceback.print_exc()
            check = Check(name, "failed", f"{type(error).__name__}: {error}")
        self.checks.append(check)
        print(f"  {check.verdict}: {check.text}", flush=True)

    def require_cuda(self) -> None:
        """Raise Skipped on CPU ranks."""
        if not self.on_cuda:
            raise Skipped(NEEDS_CUDA)

    def skip_on_cpu(self, *names: str) -> None:
        """On CPU ranks, add these checks as skipped."""
        if not self.on_cuda:
            self.checks += [Check(name, "skipped", NEEDS_CUDA) for name in names]

    def require_two_ranks(self) -> None:
        """Raise Skipped on one rank."""
        if self.ranks < 2:
            raise Skipped(NEEDS_TWO)

    def require_own_gpus(self) -> None:
        """Raise Skipped if ranks share a GPU."""
        if self.sharing > 1:
            raise Skipped("needs a GPU for each rank")

    def require_time(self, seconds: float) -> None:
        """Raise Skipped if the step has less time left than this."""
        if time.monotonic() - self.began + seconds > self.limit_s:
            raise Skipped(f"no time was left of {self.limit_s:.0f} s: see --limit")

    def run(
        self, module: str, arguments: list[str], name: str, ranks: int | None = None
    ) -> Outcome:
        """Run main(arguments) of `module` on `ranks` ranks, and wait for all. `name`: folder of
        logs.

        CPU ranks are forked, which saves their imports. CUDA does not survive a fork.
        """
        logs, count = self.folder / name, ranks or self.ranks
        if not self.on_cuda:
            self._zygote = self._zygote or Zygote()
            return self._zygote.run(
                arguments, logs, ranks=count, limit_s=math.inf, main=module, patience_s=_PATIENCE_S
            )
        command = [sys.executable, "-m", module, *arguments]
        with started(command, count, REPOSITORY, logs, ON_CUDA) as group:
            return group.wait(patience_s=_PATIENCE_S)

    def gate(self, name: str, *words: str, **variables: str) -> tuple[int, list[str], str]:
        """Run `python -m tests.gates.NAME`; return its exit code, its lines, and its last error."""
        done = subprocess.run(
            [sys.executable, "-m", f"tests.gates.{name}", *words], cwd=REPOSITORY,
            env=environment(variables), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", check=False,
        )  # fmt: skip
        print(done.stdout, done.stderr, sep="", flush=True)
        lines = [readable(line) for line in done.stdout.splitlines()]
        return done.returncode, lines, readable(done.stderr.strip().rpartition("\n")[2])

    def computed(self, module: str, name: str, *arguments: str) -> Any:
        """Run main([OUT, *arguments]) of `module` on one rank; return the JSON it writes to OUT."""
        out = self.folder / f"{name}.json"
        ended = self.run(module, [str(out), *arguments], name, ranks=1)
        expect(ended.codes == [0], f"it ended with {ended.codes}: {tail(ended)}")
        return json.loads(out.read_text())

    def train(
        self,
        run: RunFolder,
        *settings: str,
        name: str,
        json_name: str,
        code: int = ExitCode.DONE,
        ranks: int | None = None,
        fault: dict[str, Any] | None = None,
    ) -> Outcome:
        """Train the tiny model on its data; all ranks must end with `code`."""
        words = [f"--deepspeed={REPOSITORY / 'ds_configs' / json_name}.json", *self.settings]
        words += [f"run.dir={run.path}", *settings]
        ended = self.run("tools.acceptance.plant", [json.dumps(fault), *words], name, ranks)
        if set(ended.codes) != {int(code)}:
            raise Failed(f"{name}: ranks ended with {ended.codes}, not with {code}: {tail(ended)}")
        return ended

    @property
    def settings(self) -> list[str]:
        """Settings of a short run of a tiny model: the demo's on GPUs, a smaller one on CPUs."""
        sizes = {} if self.on_cuda else _SMALL
        corpus = self.shared / "corpus"
        if not corpus.exists():
            _write_corpus(corpus)
        return [
            *(f"model.overrides.{key}={value}" for key, value in sizes.items()),
            f"data.path={corpus}",
            f"data.cache_dir={self.shared / 'cache'}",
            f"data.seq_len={256 if self.on_cuda else 32}",
            f"train.global_batch={8 * self.ranks}",
            "train.micro_batch=2",
            "optim.schedule=constant",
            "optim.warmup_steps=0",
            "eval.samples=8",
            "eval.every=0",
            "log.every=1",
            "sample.tokens=0",
            "save.export=false",
        ]

    def timed_settings(self, *without: str) -> dict[str, str]:
        """Return `settings` for tools/speed, which sets the batch itself."""
        settings = dict(text.split("=", 1) for text in self.settings)
        return {k: v for k, v in settings.items() if k not in ("train.global_batch", *without)}

    def close(self) -> None:
        """End the process that forks ranks."""
        if self._zygote is not None:
            self._zygote.close()


def tail(ended: Outcome) -> str:
    """Return the last line of each rank."""
    lines = [output.strip().rpartition("\n")[2] for output in ended.outputs]
    return readable("; ".join(dict.fromkeys(filter(None, lines))))


def expect(condition: bool, otherwise: str) -> None:
    """Raise Failed unless a condition holds."""
    if not condition:
        raise Failed(otherwise)


def _write_corpus(folder: Path) -> None:
    """Write this library's own source: a small amount of real text."""
    partial = folder.with_name(f"{folder.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    for number, path in enumerate(sorted((REPOSITORY / "harness").rglob("*.py"))):
        (partial / f"{number:04}.txt").write_bytes(path.read_bytes())
    partial.rename(folder)


def do_step(where: str, folder: str, ranks: str, accelerator: str, limit_s: str) -> None:
    """Run a step, "MODULE:FUNCTION", in this process; write FOLDER/result.json."""
    if accelerator == "cuda":
        os.environ |= ON_CUDA
    module, _, function = where.partition(":")
    look = getattr(importlib.import_module(module), function)
    own = Path(folder)
    bench = Bench(own, own.parent, int(ranks), accelerator, float(limit_s))
    with contextlib.closing(bench):
        figure = look(bench)
    checks = [asdict(check) for check in bench.checks]
    result = {"figure": figure, "checks": checks, "values": bench.values}
    (own / "result.json").write_text(json.dumps(result), encoding="utf-8")


def tiny_engine(
    world: World, device: Any, seq_len: int, document_mask: bool = False, **model: Any
) -> Any:
    """Return the engine of the tiny model under ZeRO 1, with one sample per step. Collective."""
    from harness.engine.build import build_engine  # torch and DeepSpeed

    run = RunConfig.model_validate(
        {
            "model": {"name": "tiny", **model},
            "data": {"seq_len": seq_len, "document_mask": document_mask},
            "train": {"global_batch": 1, "micro_batch": 1, "steps": 2},
            "optim": {"warmup_steps": 0},
        }
    )
    stage = {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}}
    return build_engine(make_plan(run, stage, world), device, document_mask=document_mask)


def on_rank(out: str, compute: Callable[[World, Any], Any]) -> int:
    """Join the other ranks and write compute(world, device) to `out`, which may name the {rank}."""
    from harness.engine.processes import ending_together, join  # torch and DeepSpeed

    world = World.from_environ()
    with ending_together():
        device = join(world)
        Path(out.format(rank=world.rank)).write_text(json.dumps(compute(world, device)))
    return 0
