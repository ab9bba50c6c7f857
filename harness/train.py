"""Train a decoder: `deepspeed harness/train.py --deepspeed ds_configs/zero3.json key=value ...`."""

from __future__ import annotations

import sys
from pathlib import Path

# As a script, Python puts harness/ itself on the path; the package is found from its parent.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.command import parse_command, plan_from
from harness.errors import ConfigError


def main(argv: list[str]) -> int:
    """argv -> Plan -> run -> exit code."""
    command = parse_command(argv)
    try:
        plan = plan_from(command)
        if command.dry_run:
            print(plan.describe())
            return 0
        from harness.run import build, train  # torch and DeepSpeed from here on

        return int(train(build(plan, command.trust_remote_code)))
    except ConfigError as error:
        print(f"cannot train: {error}", file=sys.stderr)
        return int(error.code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
