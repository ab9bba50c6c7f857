"""Jobs in Slurm's queue."""

import shutil
import subprocess
from collections.abc import Sequence


def slurm_problems() -> list[str]:
    """Return a problem for each Slurm command that this machine lacks."""
    missing = [name for name in ("sbatch", "squeue") if shutil.which(name) is None]
    return [f"--slurm needs {name}: start it on a node that can submit jobs" for name in missing]


def queued(jobs: Sequence[str]) -> dict[str, str]:
    """Return the tasks of these jobs that wait or run, and Slurm's reason for each; all jobs,
    without reasons, if Slurm does not answer.
    """
    if not jobs:
        return {}
    command = ["squeue", "--noheader", f"--jobs={','.join(jobs)}", "--format=%i %r"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and "Invalid job id" not in done.stderr:
        return dict.fromkeys(jobs, "")
    lines = (line.partition(" ") for line in done.stdout.splitlines() if line.strip())
    return {task: reason.strip() for task, _, reason in lines}
