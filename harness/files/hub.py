"""Whether the hub can be asked: its client waits and tries again for half a minute where not."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

_DEFAULT = "https://huggingface.co"


def hub_answers() -> bool:
    """Return False if the hub's address is not known on this machine."""
    host = urlsplit(os.environ.get("HF_ENDPOINT") or _DEFAULT).hostname
    if host is None or getproxies():  # a proxy knows addresses for us
        return True
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False
