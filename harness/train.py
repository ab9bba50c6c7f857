"""Train a decoder: `deepspeed harness/train.py --deepspeed ds_configs/zero3.json key=value ...`."""

import contextlib
import io
import json
import sys
from pathlib import Path

# Python puts the script's folder, harness/, on the path; imports need its parent.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.guard.stop_request import StopRequest


def main(argv: list[str]) -> int:
    """Plan and train a run; return its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # texts of a corpus, on any terminal
        sys.stdout.reconfigure(errors="backslashreplace")
    with contextlib.closing(StopRequest()) as request:  # before the slow imports
        from harness.errors import ConfigError, JoinRefused, RunStopped
        from harness.layout.world import has_other_nodes
        from harness.plan.command import parse_command, plan_from
        from harness.run.dry_run import dry_run, without_torch
        from harness.terminal import say, takes_colour

        command = parse_command(argv)
        if command.dry_run:
            request.close()  # Ctrl-C ends a dry run like any command
        try:
            elsewhere = command.elsewhere()
            plan = plan_from(command, world=elsewhere)
            if command.dry_run:
                if not command.show:
                    without_torch()
                seen = dry_run(plan, elsewhere is not None, command.trust_remote_code, command.show)
                colour = takes_colour(sys.stdout)
                say(json.dumps(seen.to_json()) if command.json else seen.text(color=colour))
                return int(seen.code)
            from harness.engine.importing import importing

            with importing():  # torch and DeepSpeed from here on
                from harness.engine.processes import ending_together
                from harness.loop import build, train

            with ending_together("cannot train"):
                return int(train(build(plan, command.trust_remote_code, request=request)))
        except RunStopped as stop:
            say(f"stopped before the first step: {stop.message}", sys.stderr)
            return int(stop.code)
        except ConfigError as error:
            say(f"cannot train: {error}", sys.stderr)
            joined = isinstance(error, JoinRefused)
            if not (command.dry_run or joined) and has_other_nodes():
                from harness.engine.processes import refuse_on_other_nodes

                refuse_on_other_nodes(error)
            return int(error.code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
