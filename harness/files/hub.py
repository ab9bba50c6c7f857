"""Tests whether the hub can be reached; without a network its client retries for half a minute."""

import os
import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

_DEFAULT = "https://huggingface.co"


def hub_answers() -> bool:
    """Return False if the hub's host name cannot be resolved."""
    host = urlsplit(os.environ.get("HF_ENDPOINT") or _DEFAULT).hostname
    if host is None or getproxies():  # a proxy resolves names for us
        return True
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False
