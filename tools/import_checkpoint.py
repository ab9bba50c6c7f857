"""Import weights and moments from a checkpoint in DeepSpeed's own format, to resume from it.

    python tools/import_checkpoint.py outputs --out runs/NEW
    python tools/import_checkpoint.py outputs/checkpoint-500 --out runs/NEW
    python tools/import_checkpoint.py saved/global_step500 --model llama-1b --out runs/NEW

SOURCE is a checkpoint of the Hugging Face Trainer or of DeepSpeed's save_checkpoint, or the folder
of several (the newest, or FOLDER@STEP), with ZeRO 1, 2 or 3 and any number of ranks. Its files are
pickles: a file that asks for anything but tensors and plain values is rejected before it is opened.
resume.from=runs/NEW@STEP starts a run with its weights and moments.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.errors import ConfigError, ExitCode, Unusable, is_full_disk
from harness.files.paths import option_path
from harness.runfolder import RunFolder
from harness.terminal import command_parser, say
from tools.workers import INTERRUPTED


def main(argv: list[str]) -> int:
    """Run the command: argv -> checkpoint -> exit code."""
    parser, add = command_parser(__doc__)
    add("source", type=option_path, help="FOLDER, FOLDER@STEP, or the folder of a checkpoint.")
    add("--out", type=option_path, required=True, help="Run folder; it may exist already.")
    add("--model", help="Preset, folder or config.json; default: the config.json in SOURCE.")
    arguments = parser.parse_args(argv)
    from tools.importing.native import find_source  # torch from here on
    from tools.importing.write import import_checkpoint

    try:
        source = find_source(str(arguments.source), arguments.model)
        print(f"reading {source.path} ...", file=sys.stderr, flush=True)
        path = import_checkpoint(source, RunFolder(arguments.out))
    except Unusable as error:
        return _fail(str(error), ExitCode.NO_CHECKPOINT)
    except ConfigError as error:
        return _fail(str(error), error.code)
    except OSError as error:
        code = ExitCode.CANNOT_SAVE if is_full_disk(error) else ExitCode.BAD_CONFIG
        return _fail(f"{error}: fix this, or choose another folder (--out)", code)
    except KeyboardInterrupt:
        return _fail("interrupted; nothing was left behind", INTERRUPTED)
    step = int(path.name.removeprefix("step-"))
    say(f"imported {path}; resume with resume.from={arguments.out}@{step}")
    return 0


def _fail(message: str, code: int) -> int:
    say(f"cannot import: {message}", sys.stderr)
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
