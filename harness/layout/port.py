"""The port at which the ranks of a Slurm step meet, which nobody else may listen on."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

_FIRST, _COUNT = 20000, 10000  # below those that Linux gives to outgoing connections
_PER_JOB, _PER_RESTART = 101, 13  # steps of jobs that share a node do not meet at one port


def slurm_port(environ: Mapping[str, str] = os.environ) -> int:
    """Return the port that all ranks of a step compute alike, another one for each job, restart
    and step: what failed at a port that was taken succeeds when it is started again.
    """
    job, restart, step = (
        int(environ.get(name, "0"))
        for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
    )
    return _FIRST + (_PER_JOB * job + _PER_RESTART * restart + step) % _COUNT


def free_port(first: int) -> int:
    """Return `first`, or the next port that nobody listens on here.

    Raises OSError where there is none.
    """
    for number in range(_COUNT):
        port = _FIRST + (first - _FIRST + number) % _COUNT
        if is_free(port):
            return port
    raise OSError(f"no port from {_FIRST} to {_FIRST + _COUNT - 1} is free")


def is_free(port: int) -> bool:
    """Return whether torch's store could listen on `port` here: on all interfaces, as it does."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        with socket.create_server(("", port), family=family, dualstack_ipv6=both):
            return True
    except OSError:
        return False
