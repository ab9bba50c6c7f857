"""The main command; keeps the JSON that deepspeed.initialize is given in FOLDER/received-RANK."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed

from harness import train


def main() -> int:
    folder, *arguments = sys.argv[1:]
    initialize = deepspeed.initialize

    def spied(**given: Any) -> Any:
        (Path(folder) / f"received-{os.environ['RANK']}").write_text(json.dumps(given["config"]))
        return initialize(**given)

    deepspeed.initialize = spied
    return train.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
