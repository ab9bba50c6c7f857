"""Builds and loads an operator of one line, as DeepSpeed's are built: `... building SOURCE`."""

from __future__ import annotations

import sys

from torch.utils import cpp_extension

from harness.engine.deepspeed_0_19.builds import watch_builds

LOADED = "loaded"
SOURCE = 'extern "C" int planted() { return 1; }\n'


def main() -> None:
    """Wait for whoever builds it, build it where need be, and load it."""
    watch_builds(lambda text: print(text, flush=True))
    cpp_extension.load(name="planted", sources=[sys.argv[1]], is_python_module=False)
    print(LOADED, flush=True)


if __name__ == "__main__":
    main()
