from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from tools.acceptance.bench import Bench

IN_A_SESSION_OF_ITS_OWN = "trap '' TERM; while true; do sleep 1; done"


def look(bench: Bench) -> str:
    """Start a process that a launcher would start, and that hears no SIGTERM; then hang."""
    child = subprocess.Popen(["sh", "-c", IN_A_SESSION_OF_ITS_OWN], start_new_session=True)
    bench.say("hanging")
    Path(os.environ["PLANTED_PIDS"]).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(3600)
    return ""
