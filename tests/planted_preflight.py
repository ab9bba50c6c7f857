"""The preflight with a manipulated rank: CODE, then the tool's own arguments."""

import os
import runpy
import sys

from tests.real_runs import REPOSITORY

TOOL = str(REPOSITORY / "tools" / "preflight.py")


def main() -> None:
    code, *arguments = sys.argv[1:]
    sys.argv = [TOOL, *arguments]
    exec(code, {"rank": int(os.environ["RANK"]), "os": os, "sys": sys})
    runpy.run_path(TOOL, run_name="__main__")


if __name__ == "__main__":
    main()
