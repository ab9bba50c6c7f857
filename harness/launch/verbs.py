"""The installed command: train.py and the tools, each a verb, from any folder.

    decoder-harness train --deepspeed zero3.json model.name=llama-1b
    decoder-harness plan --model llama-3-8b --gpus 64 --gpu h100-80 --seq-len 4096 ...

A verb is a file's name, with - for _; the beginning of one suffices where no other begins so.
Configs that the clone ships are found by name, and a file in the current folder comes first.
`train` is one rank, or one of those that srun, mpirun or another launcher starts. Several ranks on
this machine:

    deepspeed harness/train.py --deepspeed zero3.json ...
    torchrun --nproc-per-node 8 harness/train.py --deepspeed zero3.json ...
"""

import sys
from pathlib import Path
from types import ModuleType

from harness.config.assignments import did_you_mean
from harness.files.paths import REPOSITORY, script
from harness.terminal import command_parser

NAME = "decoder-harness"


def verbs() -> dict[str, Path]:
    """Return the file of each verb: train.py, and the files of tools/ that run as programs."""
    tools = sorted((REPOSITORY / "tools").glob("*.py"))
    programs = [path for path in tools if '__name__ == "__main__"' in path.read_text("utf-8")]
    files = [REPOSITORY / "harness" / "train.py", *programs]
    return {path.stem.replace("_", "-"): path for path in files}


def summary(path: Path) -> str:
    """Return the first line of a file's docstring."""
    with path.open(encoding="utf-8") as file:
        return file.readline().strip().strip('"')


def main() -> int | None:
    """Run the verb of sys.argv as `python FILE` would, in this process and with its exit code."""
    files = verbs()
    lines = [f"  {verb:<18}  {summary(path)}" for verb, path in files.items()]
    about = (__doc__ or "").replace("harness/train.py", script("harness/train.py"))
    epilog = "\n".join(["verbs:", *lines])
    parser, _ = command_parser(about, prog=NAME, usage=f"{NAME} VERB ...", epilog=epilog)
    if not (REPOSITORY / "ds_configs").is_dir():
        parser.error(f"{REPOSITORY} is not a clone: run `make setup` or `pip install -e .` in one")
    asked = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if asked.startswith("-"):
        parser.parse_args([asked])
    name = asked.replace("_", "-")
    chosen = [name] if name in files else [verb for verb in files if verb.startswith(name)]
    if len(chosen) != 1:
        near = f", it begins {' and '.join(chosen)}" if chosen else did_you_mean(name, files)
        parser.error(f"{asked} is not a verb{near}; --help lists all verbs")
    (verb,) = chosen
    sys.argv[:2] = [f"{NAME} {verb}"]
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__file__ = str(files[verb])
    exec(compile(files[verb].read_bytes(), module.__file__, "exec"), vars(module))
    return 0
