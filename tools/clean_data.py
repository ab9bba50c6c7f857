"""Clean a corpus: duplicates, quality, language, harmful words, personal data, evaluation data.

    python tools/clean_data.py corpus.jsonl cleaned --recipe light
    python tools/clean_data.py pages/ cleaned --recipe fineweb language.keep='["de"]' c4=false
    python tools/clean_data.py pages/ cleaned --recipe my-recipe.toml --slurm
    python tools/clean_data.py pages/ cleaned --tokenizer my-tokenizer
    python tools/clean_data.py --keys

IN is plain text in any format that data.path reads: JSON lines, CSV, Parquet, text files, or a
folder of these. OUT becomes a folder with data/ (JSON lines, for data.path=OUT/data), removed/STEP/
(the documents that each step removed), report.html, report.json and report.txt. A recipe is a
preset or a TOML file with a table for each step; key=value changes it. datatrove does the work, on
all cores or, with --slurm, as dependent job arrays that use slurm/site.env. --tokenizer takes a
folder or hub id and also tokenizes the cleaned text, as tools/tokenize_data.py does, into
OUT/tokens.bin and OUT/tokens.idx for data.path=OUT/tokens.

After an interruption, the same command continues, and the result has the same bytes. Exit code 0;
2 for input with problems; 74 if the disk is full; 75 if it was stopped.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.errors import ConfigError, ExitCode, is_full_disk
from harness.files.paths import option_path, script
from harness.terminal import command_parser, say
from tools.cleaning.recipe import PRESETS, Recipe, keys_as_text, missing_for, read_recipe
from tools.workers import Stopped, WorkerFailed, cores, stopping

if TYPE_CHECKING:
    from tools.cleaning.pipeline import Pipeline

_SAMPLE_BYTES = 2_000_000  # bytes of text measured for the report


def main(argv: list[str]) -> int:
    """Run the command: argv -> cleaned corpus and report -> exit code."""
    args = _parser().parse_intermixed_args(argv)
    if args.keys:
        say(keys_as_text())
        return int(ExitCode.DONE)
    try:
        with stopping():
            return _clean(args)
    except Stopped as stop:
        jobs = "; queued jobs continue, scancel ends them" * args.slurm
        say(f"stopped by {stop}{jobs}; the same command resumes", sys.stderr)
        return int(ExitCode.STOPPED)
    except ConfigError as error:
        of_ours = [text.replace("data.path: ", "IN: ", 1) for text in error.problems]
        say(f"cannot clean: {ConfigError(of_ours)}", sys.stderr)
        return int(error.code)
    except (OSError, WorkerFailed) as error:
        say(f"cannot clean: {error}\nthe same command resumes with the rest", sys.stderr)
        return int(ExitCode.CANNOT_SAVE) if is_full_disk(error) else 1


def _parser() -> argparse.ArgumentParser:
    parser, add = command_parser(__doc__)
    add("input", nargs="?", metavar="IN", help="Text in any format that data.path reads.")
    add("output", nargs="?", type=option_path, metavar="OUT", help="Folder for the result.")
    presets = ", ".join(PRESETS)
    add("--recipe", default="light", help=f"{presets}, or FILE.toml (default: %(default)s).")
    add("--text", metavar="COLUMN", help="Column with the text (default: text).")
    add("--split", metavar="NAME", help="Split of a folder, as in data.split (default: train).")
    add("--workers", type=int, default=cores(), help="Number of processes (default: %(default)s).")
    add("--slurm", action="store_true", help="Run as Slurm job arrays, with slurm/site.env.")
    add("--tokenizer", metavar="TOKENIZER", help="Also write OUT/tokens.bin and OUT/tokens.idx.")
    add("--trust-remote-code", action="store_true", help="Run code that comes with the tokenizer.")
    add("--keep-work", action="store_true", help="Keep the intermediate files.")
    add("--json", action="store_true", help="Print the report as JSON.")
    add("--dry-run", action="store_true", help="Check everything and exit.")
    add("--keys", action="store_true", help="List the keys of a recipe.")
    add("assignments", nargs="*", metavar="key=value", help="Keys of the recipe to change.")
    return parser


def _clean(args: argparse.Namespace) -> int:
    recipe, corpus = _checked(args)
    from tools.cleaning.pipeline import alone, empty, keep_identity, write_report

    pipeline = _pipeline(args, recipe, corpus)
    if args.dry_run:
        stages = " -> ".join(f"{stage.name} ({stage.tasks})" for stage in pipeline.stages())
        say(f"{corpus.path}: {corpus.num_bytes() / 1e6:,.1f} MB; stages (tasks): {stages}")
        return int(ExitCode.DONE)
    is_new = not args.output.exists()
    args.output.mkdir(parents=True, exist_ok=True)
    with alone(args.output):
        keep_identity(pipeline)
        try:
            _run(args, pipeline)
        except ConfigError:
            if pipeline.problems.exists():  # the repaired input will be another corpus
                empty(args.output)
                if is_new:
                    args.output.rmdir()
            raise
        report = write_report(pipeline)
        if not args.keep_work:
            shutil.rmtree(pipeline.work, ignore_errors=True)
        if args.tokenizer is not None:
            _tokenize(args, pipeline)
    if args.json:
        print(json.dumps(report))
    else:
        from tools.cleaning.report import as_text

        say(as_text(report))
        say(f"data: data.path={pipeline.data}; report: {args.output / 'report.html'}")
    return int(ExitCode.DONE)


def _tokenize(args: argparse.Namespace, pipeline: Pipeline) -> None:
    """Write the tokens of the cleaned text. Raises ConfigError, OSError, WorkerFailed."""
    from harness.config.run_config import RunConfig
    from tools.tokenizing.work import Share, tokenized

    data = {"path": str(pipeline.data), "tokenizer": args.tokenizer}
    run, how = RunConfig.model_validate({"data": data}), Share(args.workers)
    out, trust = args.output / "tokens", args.trust_remote_code
    try:
        for line in tokenized(
            run, out, how, lambda line: say(line, sys.stderr), trust_remote_code=trust
        ):
            say(line, sys.stderr if args.json else sys.stdout)
    except ConfigError as error:
        texts = [text.removeprefix("data.path: ") for text in error.problems]
        raise ConfigError([f"--tokenizer: {text}" for text in texts]) from error


def _checked(args: argparse.Namespace) -> tuple[Recipe, Any]:
    """Return the recipe and the corpus. Raises ConfigError with all problems."""
    from harness.files.corpus import find_corpus

    problems: list[str] = []
    recipe = corpus = None
    try:
        recipe = read_recipe(args.recipe, args.assignments)
    except ConfigError as error:
        problems += error.problems
    if args.input is None or args.output is None:
        problems.append("IN and OUT are needed: tools/clean_data.py IN OUT --recipe light")
    if args.workers < 1:
        problems.append(f"--workers is {args.workers}: it must be at least 1")
    if args.input is not None:
        columns = {} if args.text is None else {"text": args.text}
        try:
            corpus = find_corpus(args.input, columns=columns, split=args.split)
        except ConfigError as error:
            problems += [text.replace("data.split", "--split") for text in error.problems]
    if args.output is not None and args.output.exists() and not args.output.is_dir():
        problems.append(f"OUT: {args.output} is a file: give a folder")
    if recipe is not None:
        problems += missing_for(recipe)
    problems += _tokenizer_problems(args)
    if args.slurm:
        from tools.slurm_queue import slurm_problems

        problems += slurm_problems()
    if problems or recipe is None or corpus is None:
        raise ConfigError(problems)
    from tools.cleaning.steps import why_no_text

    if corpus.split:
        say(f"{corpus.path}: {corpus.split_text}", sys.stderr)
    if why := why_no_text(corpus):
        raise ConfigError(f"IN: {corpus.path} {why}")
    return recipe, corpus


def _tokenizer_problems(args: argparse.Namespace) -> list[str]:
    """Return the reasons why tokenizing would fail, before the cleaning starts."""
    if args.tokenizer is None:
        return []
    if args.slurm:
        return [
            "--tokenizer with --slurm would tokenise on this node: leave it out, and then sbatch "
            f"--array=0-15 {script('slurm/tokenize.sbatch')} "
            + shlex.join((f"data.path={args.output}/data", f"data.tokenizer={args.tokenizer}"))
        ]
    from harness.data.tokenizer import load_tokenizer

    try:
        load_tokenizer(args.tokenizer, trust_remote_code=args.trust_remote_code)
    except ConfigError as error:
        return [text.replace("data.tokenizer: ", "--tokenizer: ", 1) for text in error.problems]
    return []


def _pipeline(args: argparse.Namespace, recipe: Recipe, corpus: Any) -> Pipeline:
    from harness.data.shards import shards_of
    from tools.cleaning.pipeline import Pipeline

    shards = shards_of(corpus)
    measured = shards[:: max(1, len(shards) // 16)]
    one_in = max(1, sum(shard.num_bytes for shard in measured) // _SAMPLE_BYTES)
    ranks = frozenset(range(0, len(shards), max(1, len(shards) // 16)))
    return Pipeline(recipe, corpus, shards, args.output, one_in, ranks)


def _run(args: argparse.Namespace, pipeline: Pipeline) -> None:
    from harness.data.cache import fill_once
    from tools.cleaning.stages import run_here
    from tools.cleaning.steps import write_n_grams

    recipe, logs = pipeline.recipe, pipeline.out / "logs"
    if step := recipe.decontaminate:
        write = partial(write_n_grams, step.files, step.n_grams, recipe.words)
        fill_once(pipeline.work / "n-grams", write, lambda line: None)  # jobs may be reading it
    stages, problems = [*pipeline.stages()], pipeline.problems
    if args.slurm:
        from tools.cleaning.stages import run_on_slurm

        stream = sys.stderr if args.json else sys.stdout
        run_on_slurm(stages, logs, recipe.slurm, problems, lambda text: say(text, stream))
    else:
        sizes = [shard.num_bytes for shard in pipeline.shards]
        run_here(stages, logs, sizes, args.workers, problems)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as other commands do before `| head`
    sys.exit(main(sys.argv[1:]))
