"""Import weights and moments from a checkpoint in DeepSpeed's own format, to resume from it.

    python tools/import_checkpoint.py outputs --out runs/NEW
    python tools/import_checkpoint.py outputs/checkpoint-500 --out runs/NEW
    python tools/import_checkpoint.py saved/global_step500 --model llama-1b --out runs/NEW

SOURCE is a checkpoint of the Hugging Face Trainer or of DeepSpeed's save_checkpoint, or the folder
of several (the newest, or FOLDER@STEP), with ZeRO 1, 2 or 3 and any number of ranks. Its files are
pickles: a file that asks for anything but tensors and plain values is rejected before it is opened.
resume.from=runs/NEW@STEP starts a run with its weights and moments.
"""

import argparse
import json
import shutil
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.checkpoint.export import replacing
from harness.checkpoint.index import INDEX, Entry, Index, to_index
from harness.checkpoint.manifest import MANIFEST, Manifest, TrainState, Written
from harness.checkpoint.store import Store, verified
from harness.checkpoint.tensor_file import write_bytes, write_fragments
from harness.data.tokenizer_files import copy_tokenizer
from harness.errors import ConfigError, ExitCode, Unusable, is_full_disk
from harness.files.paths import option_path
from harness.runfolder import RunFolder
from harness.terminal import HelpFormatter, say
from tools.importing.native import Native, Source, find_source
from tools.workers import INTERRUPTED


def main(argv: list[str]) -> int:
    """Run the command: argv -> checkpoint -> exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("source", type=option_path, help="FOLDER, FOLDER@STEP, or the folder of a checkpoint.")
    add("--out", type=option_path, required=True, help="Run folder; it may exist already.")
    add("--model", help="Preset, folder or config.json; default: the config.json in SOURCE.")
    arguments = parser.parse_args(argv)
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


def import_checkpoint(source: Source, run: RunFolder) -> Path:
    """Write the content of `source` to the run's checkpoints; return the new one, verified.

    Raises Unusable if the source is incomplete or unsafe, and ConfigError if the step exists.
    """
    native, store = Native(source.engine), Store(run.checkpoints_dir)
    manifest = _manifest(source, native)
    step = manifest.state.step
    if store.at(step).exists():
        raise ConfigError(f"{store.at(step)} exists: choose another --out")
    store.make_unfinished(step)
    folder = store.unfinished(step)
    try:
        _write(folder, native, manifest)
        if any(source.path.glob("tokenizer*")) and not run.tokenizer_dir.exists():
            with replacing(run.tokenizer_dir) as unfinished:
                copy_tokenizer(source.path, unfinished)
        path = store.publish(step)  # last: if killed before this, the same command starts over
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    verified(path)
    return path


def _write(folder: Path, native: Native, manifest: Manifest) -> None:
    """Write all files, the manifest last. One rank's tensors are read at a time."""
    files: list[Written] = []
    entries: list[Entry] = []
    for number, fragments in enumerate(native.by_rank()):
        written, here = write_fragments(folder, number, fragments)
        files, entries = [*files, *written], [*entries, *here]
    index = to_index(entries)
    Index(index, native.folder).check()  # the only check that counts frozen weights
    files.append(write_bytes(folder / INDEX, json.dumps(index).encode()))
    write_bytes(folder / MANIFEST, replace(manifest, files=files).to_bytes())


def _manifest(source: Source, native: Native) -> Manifest:
    counters = native.scalars["counters"]
    return Manifest(
        state=TrainState(counters["global_steps"], counters["global_samples"]),
        precision=native.precision,
        model_config=source.model_config,
        data_fingerprint=None,
        engine=native.scalars,
        probe_loss=None,
        held_out_loss=None,
        about={
            "imported_from": str(source.path.resolve()),
            "world_size": native.ranks,
            "zero_stage": native.stage,
            "versions": {name: version(name) for name in ("torch", "transformers")},
        },
    )


def _fail(message: str, code: int) -> int:
    say(f"cannot import: {message}", sys.stderr)
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
