"""Export a checkpoint to a folder that `AutoModelForCausalLM.from_pretrained` opens.

    python tools/export_hf.py runs/NAME
    python tools/export_hf.py runs/NAME --step 1000 --dtype fp32 --out my-model

Works at any time, even during the run, and on any machine: it needs neither a GPU nor DeepSpeed,
accepts every layout, and holds only a piece of a tensor in memory. Afterwards it opens the exported
model and checks that its loss on the checkpoint's probe batch equals the loss in training. This
takes the memory of the model; --no-check omits it. The folder appears only after success.
"""

import argparse
import re
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.checkpoint.store import checkpoint_of
from harness.config.assignments import MAX_INTEGER
from harness.config.run_config import run_and_step
from harness.errors import CannotSave, ConfigError, ExitCode, Unusable, is_full_disk
from harness.estimate.memory_item import as_size
from harness.files.paths import option_path
from harness.runfolder import RunFolder
from harness.terminal import command_parser, say
from tools.workers import INTERRUPTED

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def main(argv: list[str]) -> int:
    """Run the command: argv -> a folder -> exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    from harness.run.exporting import ExportDiffers, ExportOptions, export  # torch from here on

    path, step = run_and_step(str(arguments.run))
    if step is not None and arguments.step not in (None, step):
        parser.error(
            f"{arguments.run} and --step {arguments.step} name different steps: remove one"
        )
    step = arguments.step if step is None else step
    if not path.is_dir():
        parser.error(f"{path} is not a folder: give a run folder (run.dir)")
    run = RunFolder(path)
    try:
        source = (run.read_plan() or {}).get("model_source")
    except ConfigError as error:
        return _fail(str(error), error.code)
    out = arguments.out or (run.export_dir if step is None else path / f"export-step-{step}")
    options = ExportOptions(
        dtype=arguments.dtype,
        shard_bytes=arguments.shard_size,
        check=not arguments.no_check,
        merge=arguments.merge,
        source=source,
        trust_remote_code=arguments.trust_remote_code,
    )
    try:
        _say("reading and verifying the checkpoint ...")
        checkpoint = checkpoint_of(str(path) if step is None else f"{path}@{step}")
        _say(f"exporting step {checkpoint.state.step:,} of {path} to {out}")
        if not run.tokenizer_dir.is_dir():
            _say(f"{run.tokenizer_dir} does not exist: the export will have no tokenizer")
        checked = export(checkpoint, out, run.tokenizer_dir, options, Shown())
    except Unusable as error:
        return _fail(str(error), ExitCode.NO_CHECKPOINT)
    except CannotSave as error:
        return _fail(f"{error}: choose another folder (--out), or a smaller --dtype", error.code)
    except ConfigError as error:
        return _fail(str(error), error.code)
    except FileNotFoundError as error:
        return _fail(f"{error}: has the run removed it since?", ExitCode.NO_CHECKPOINT)
    except OSError as error:
        code = ExitCode.CANNOT_SAVE if is_full_disk(error) else ExitCode.BAD_CONFIG
        return _fail(f"{error}: fix this, or choose another folder (--out)", code)
    except ExportDiffers as error:  # rejected, like a run that would continue from it
        return _fail(f"{error}; --no-check exports it anyway", ExitCode.NO_CHECKPOINT)
    except KeyboardInterrupt:
        return _fail("interrupted; nothing was left behind", INTERRUPTED)
    say(f"exported {out}; {checked}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser, add = command_parser(__doc__)
    add("run", type=option_path, help="Run folder, or RUN@STEP.")
    add("--step", type=int, help="Step of the checkpoint (default: the newest usable one).")
    kinds = ("bf16", "fp16", "fp32")
    add("--dtype", choices=kinds, help="Type of the weights (default: the run's precision).")
    out = "Folder to write (default: RUN/export, or RUN/export-step-N with a step)."
    add("--out", type=option_path, help=out)
    size = "Maximum size per file, e.g. 500MB (default: 4GB)."
    add("--shard-size", type=_bytes, default=4 * 10**9, help=size)
    add("--no-check", action="store_true", help="Do not verify the export by comparing its loss.")
    add("--merge", action="store_true", help="Merge adapters (model.lora) into the weights.")
    add("--trust-remote-code", action="store_true", help="Run code that comes with the model.")
    return parser


class Shown:
    """Shows progress of the export on standard error, every few seconds and at the end."""

    def __init__(self, every_s: float = 5.0) -> None:
        self._every_s, self._next = every_s, time.monotonic() + every_s

    def __call__(self, done: int, total: int) -> None:
        """Show the bytes written so far, and the total."""
        if time.monotonic() >= self._next or done == total:
            self._next = time.monotonic() + self._every_s
            _say(f"written {as_size(done)} of {as_size(total)} ({done / total:.0%})")


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)B?", text.upper())
    size = float(match[1]) * _UNITS[match[2]] if match else 0
    if not 1 <= size <= MAX_INTEGER:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write it as 4GB or 500MB")
    return int(size)


def _say(text: str) -> None:
    say(text, sys.stderr)


def _fail(message: str, code: int) -> int:
    _say(f"cannot export: {message}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
