"""One rank of a run: a fault as JSON, or null, then the arguments of harness/train.py."""

from __future__ import annotations

import json
import sys

from harness import train


def main(argv: list[str]) -> int:
    """Plant the fault and train."""
    fault, *arguments = argv
    if planted := json.loads(fault):
        from tools.acceptance.plant import plant

        plant(planted)
    return train.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
