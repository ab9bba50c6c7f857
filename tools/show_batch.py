"""Show the tokens that a step of a run reads and learns, example by example.

    python tools/show_batch.py runs/NAME                  # the first step
    python tools/show_batch.py runs/NAME --step 40 --all  # every window, in full
    python tools/show_batch.py runs/NAME --ids            # with exact ids, targets and positions
    python tools/show_batch.py runs/NAME --json

Learned tokens are in «» or, on a terminal, green unless NO_COLOR is set.

The run folder is all it needs: it rebuilds the data and its order from plan.json, and refuses if
they are no longer those that the run was planned with.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.checkpoint.compatibility import recorded_run
from harness.errors import ConfigError
from harness.runfolder import RunFolder
from harness.terminal import command_parser, say, takes_colour

if TYPE_CHECKING:
    from harness.config.run_config import RunConfig
    from harness.data.data import Data


def main(argv: list[str]) -> int:
    """Run the command: argv -> text on standard output -> exit code."""
    parser, add = command_parser(__doc__)
    add("run", help="Run folder.")
    add("--step", type=int, default=1, help="Optimizer step, from 1 (default: 1).")
    add("--all", action="store_true", help="Show every window in full.")
    add("--ids", action="store_true", help="Also show ids, targets and positions.")
    add("--json", action="store_true", help="Print one JSON object.")
    add("--trust-remote-code", action="store_true", help="Run code that comes with the tokenizer.")
    arguments = parser.parse_args(argv)
    if arguments.step < 1:
        parser.error(f"--step {arguments.step}: steps count from 1")
    from harness.data.batch_text import first_sample_of, show_step
    from harness.data.build import build_data  # torch from here on
    from harness.data.spec import DataSpec

    folder = RunFolder(arguments.run)
    try:
        plan = folder.read_plan()
        if plan is None:
            parser.error(f"{arguments.run} has no plan.json: it is not a run folder")
        run, model_config = _planned(plan, folder.plan_path)
        events = folder.read_events()
        trust = arguments.trust_remote_code
        spec = DataSpec.of_run(run, model_config, trust_remote_code=trust)
        data = build_data(spec, lambda line: print(line, file=sys.stderr))
        planned = plan.get("data_fingerprint", data.fingerprint)
        if planned != data.fingerprint:
            raise ConfigError(
                "the data has changed since the run: fingerprint "
                f"{data.fingerprint[:16]}, planned with {planned[:16]}"
            )
    except ConfigError as error:
        say(f"cannot show: {error}", sys.stderr)
        return int(error.code)
    step, curriculum = arguments.step, run.curriculum
    first = first_sample_of(events, step, curriculum)
    reads = curriculum.at(first)
    if arguments.json:
        shown = step_as_json(data, step, reads.global_batch, first, reads.pieces)
        print(json.dumps({**shown, "sequences_per_sample": reads.pieces}))
    else:
        how = {"ids": arguments.ids, "whole": arguments.all, "color": takes_colour(sys.stdout)}
        print(show_step(data, step, reads.global_batch, first, reads.pieces, **how))
        if reads.pieces > 1:
            length = run.data.seq_len // reads.pieces
            print(f"each window is read as {reads.pieces} sequences of {length} tokens (ramp.*)")
    return 0


def _planned(plan: dict[str, Any], path: Path) -> tuple[RunConfig, dict[str, Any]]:
    """Return the run config and the model of a plan. Raises ConfigError if it is damaged."""
    try:
        run = recorded_run(plan["run"])
        model_config = plan["model_config"]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is damaged: {error!r}") from error
    if not isinstance(model_config, dict):
        raise ConfigError(f"{path} is damaged: its model_config is not an object")
    if not isinstance(plan.get("data_fingerprint", ""), str):
        raise ConfigError(f"{path} is damaged: its data_fingerprint is not a string")
    return run, model_config


def step_as_json(
    data: Data, step: int, global_batch: int, first: int, pieces: int = 1
) -> dict[str, Any]:
    """Return the samples of `step`, from `first` on, as plain values; a missing target is null."""
    return {
        "step": step,
        "target_tokens": data.train.targets_in(first, global_batch),
        "data_fingerprint": data.fingerprint,
        "samples": [_sample(data, index, pieces) for index in range(first, first + global_batch)],
    }


def _sample(data: Data, index: int, pieces: int) -> dict[str, Any]:
    from harness.data.batch_text import positions_of
    from harness.data.packing import IGNORED

    sample, batch = data.train.sample(index), data.train.batch(index, 1)
    ids, labels = batch.input_ids[0].tolist(), batch.labels[0].tolist()
    return {
        "index": index,
        "epoch": sample.epoch,
        "window": sample.window,
        "source": data.sources[sample.source].name or None,
        "documents": [
            {
                "document": span.document,
                "first_token": span.first,
                "end_token": span.last,
                "file": data.sources[sample.source].corpus.name_of(span.document) or None,
            }
            for span in sample.spans
        ],
        "ids": ids,
        "targets": [None if label == IGNORED else label for label in labels],
        "positions": positions_of(batch, pieces),
        "text": data.tokenizer.decode(ids),
    }


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as other commands do before `| head`
    sys.exit(main(sys.argv[1:]))
