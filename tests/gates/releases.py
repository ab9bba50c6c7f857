"""Build an environment with the oldest supported packages, or the newest, in build/.

    python -m tests.gates.releases newest

"oldest" has the lower bound of every dependency in pyproject.toml. "newest" has the latest
releases: upper bounds are lifted, except those of packages in `KEPT`. The gate with the same name
runs in it. Needs uv, which `make setup` installs.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
KEPT = {"deepspeed", "ruff", "wandb"}  # harness/engine/deepspeed_0_19/; each ruff formats its way
SHOWN = (
    *("torch", "transformers", "deepspeed", "accelerate"),
    *("peft", "datatrove", "optuna", "nicegui"),
)


def requirements(project: dict[str, Any], lift: bool) -> list[str]:
    """Return the dependencies of all extras; with `lift`, without upper bounds."""
    lines = [*project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        lines += [line for line in extra if not line.startswith(project["name"])]
    return [_lifted(line) for line in lines] if lift else lines


def _lifted(line: str) -> str:
    return line if re.split(r"[<>=]", line)[0] in KEPT else re.sub(r",?<[^,]*", "", line)


def folder(name: str) -> Path:
    """Return the folder of an environment."""
    return REPOSITORY / "build" / name


def build(name: str) -> None:
    """Rebuild the environment, and delete its gate's records of the previous one."""
    home = folder(name)
    shutil.rmtree(home, ignore_errors=True)
    for record in (REPOSITORY / "build" / "gates").glob(f"{name}-*.txt"):
        record.unlink()
    uv = str(Path(sys.executable).with_name("uv"))
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lowest = ["--resolution", "lowest-direct"] if name == "oldest" else []
    python = str(home / "bin" / "python")
    # uv ignores pip's settings.
    environ = {"UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", ""), **os.environ}
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(home)], check=True)
    install = [uv, "pip", "install", "--quiet", "--python", python, *lowest]
    subprocess.run([*install, *requirements(project, name == "newest")], check=True, env=environ)
    listing = f"from importlib.metadata import version\nfor p in {SHOWN}: print(p, version(p))"
    subprocess.run([python, "-c", listing], check=True)


if __name__ == "__main__":
    if sys.argv[1:] not in (["oldest"], ["newest"]):
        sys.exit(__doc__)
    build(sys.argv[1])
