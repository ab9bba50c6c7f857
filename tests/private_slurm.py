"""Runs a real Slurm with two nodes on this machine, in a temporary folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from harness.launch.ranks import Ranks, free_port, start
from tests.real_runs import REPOSITORY, wait_for

NODES = ("n1", "n2")
MUNGE_PID = Path(tempfile.gettempdir()) / "munged-of-tests.pid"
NEEDED = ("slurmctld", "slurmd", "sbatch", "munged", "munge", "unmunge")


class CannotStart(Exception):
    """No private Slurm can be started here; the message has the reason."""


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    with MUNGE_PID.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class PrivateSlurm:
    """Starts munge unless it is running, slurmctld and two slurmd; ends what it started."""

    def __init__(self, folder: Path) -> None:
        missing = [name for name in NEEDED if shutil.which(name) is None]
        if missing:
            raise CannotStart(f"not installed: {', '.join(missing)} (apt install slurm-wlm munge)")
        if os.geteuid() != 0:
            raise CannotStart("slurmd and munged are started as root")
        self.folder = folder
        self._start_munge()
        self.conf = folder / "slurm.conf"
        self.conf.write_text(self._configuration())
        (folder / "state").mkdir()
        # The python of jobs, unless site.env names another.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.env = {**os.environ, "SLURM_CONF": str(self.conf), "PATH": path}
        self.daemons = [self._daemon("slurmctld", "-D")]
        self.daemons += [self._daemon("slurmd", "-D", "-N", node) for node in NODES]
        deadline = time.monotonic() + 60
        while "idle" not in self.run("sinfo", "--noheader", "--format=%T %D"):
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text()[-500:] for path in folder.glob("*/log.txt"))
                self.close()
                raise CannotStart(f"the nodes did not come up:\n{logs}")
            time.sleep(0.2)

    def run(self, *command: object, cwd: Path = REPOSITORY) -> str:
        """Return the standard output of a client command."""
        words = [str(word) for word in command]
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, cwd=cwd)
        return done.stdout.strip()

    def submit(self, folder: Path, *words: object, cwd: Path) -> Job:
        """Submit a batch job whose output goes to `folder`."""
        log = folder / "job.out"
        answer = self.run("sbatch", f"--output={log}", *words, cwd=cwd)
        submitted = re.search(r"Submitted batch job (\d+)", answer)
        assert submitted, answer
        return Job(self, submitted[1], log)

    def close(self) -> None:
        """End the daemons that it started, and munge if no other private Slurm needs it."""
        for daemon in self.daemons:
            daemon.end()
        with _one_at_a_time():
            running = {process.info["name"] for process in psutil.process_iter(["name"])}
            if MUNGE_PID.exists() and "slurmctld" not in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(MUNGE_PID.read_text()), signal.SIGTERM)
                MUNGE_PID.unlink()

    def _start_munge(self) -> None:
        """Start munge unless it runs. It outlives this process: other workers may use it."""
        with _one_at_a_time():
            if self._munge_works():
                return
            try:
                user = pwd.getpwnam("munge")
            except KeyError:
                raise CannotStart("there is no user munge") from None
            Path("/run/munge").mkdir(exist_ok=True)
            os.chown("/run/munge", user.pw_uid, user.pw_gid)
            command = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}"]
            command += ["--clear-groups", "munged", "--foreground"]
            with (self.folder / "munged.log").open("wb") as log:
                munged = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            MUNGE_PID.write_text(str(munged.pid))
            deadline = time.monotonic() + 15
            while not self._munge_works():
                if time.monotonic() > deadline:
                    munged.terminate()
                    MUNGE_PID.unlink()
                    raise CannotStart("munge does not answer")
                time.sleep(0.2)

    def _munge_works(self) -> bool:
        done = subprocess.run("munge -n | unmunge", shell=True, capture_output=True)
        return done.returncode == 0

    def _daemon(self, *command: str) -> Ranks:
        return start(command, None, REPOSITORY, self.folder / "-".join(command), self.env)

    def _configuration(self) -> str:
        node = (
            "NodeName={} NodeHostname=localhost NodeAddr=127.0.0.1 Port={} CPUs=4 RealMemory=4000"
        )
        facts = {"at": self.folder, "first_job": os.getpid(), "names": ",".join(NODES)}
        facts["nodes"] = "\n".join(node.format(name, free_port()) for name in NODES)
        return Path(__file__).with_suffix(".conf").read_text().format(port=free_port(), **facts)


@dataclass(frozen=True)
class Job:
    """A submitted batch job."""

    slurm: PrivateSlurm
    number: str
    log: Path

    @property
    def output(self) -> str:
        """Output so far, over all its starts."""
        return self.log.read_text() if self.log.exists() else ""

    @property
    def state(self) -> str:
        """PENDING, RUNNING, ...; "" once it has ended."""
        return self.slurm.run("squeue", "--noheader", "--format=%T", "--job", self.number)

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = 300) -> None:
        """Wait until `condition` holds; fail if the job ends before."""

        def holds() -> object:
            assert self.state, f"job {self.number} ended before {what}\n{self.output}"
            return condition()

        wait_for(holds, what, timeout_s, every_s=0.2)

    def cancel(self, *options: str) -> None:
        """Cancel it; with options, send it a signal."""
        self.slurm.run("scancel", *options, self.number)

    def codes(self, timeout_s: float = 600) -> list[int]:
        """Wait for its end; return the exit codes of train.py, start by start."""
        wait_for(lambda: not self.state, f"job {self.number} to end", timeout_s, every_s=0.5)
        return [int(code) for code in re.findall(r"train.py ended with (\d+)", self.output)]
