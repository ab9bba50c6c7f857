"""Serve the studio: interactive pages about runs and lessons, computed by the harness.

    python tools/studio.py
    python tools/studio.py --port 9000 --runs /scratch/runs
    python tools/studio.py --host 0.0.0.0

Listens on 127.0.0.1 and prints its address. With another --host, everybody needs the token in the
printed address. The studio only reads, and only inside the folder of runs. Stop it with Ctrl-C.
Exit code 0, or 2 if it cannot start. Needs `pip install 'nicegui>=3.18,<4'`.
"""

import importlib.util
import os
import secrets
import socket
import sys
import tempfile
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.errors import ExitCode
from harness.terminal import command_parser

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def main(argv: list[str]) -> int:
    """Run the command: argv -> an app served until Ctrl-C -> exit code."""
    parser, add = command_parser(__doc__)
    port = "port to serve on (default: %(default)s); 0: any free port"
    add("--port", type=int, default=8230, help=port)
    host = "address to serve on (default: %(default)s); non-local addresses require a token"
    add("--host", default="127.0.0.1", help=host)
    add("--runs", type=Path, default=Path("runs"), help="folder of runs (default: %(default)s)")
    cold = "do not compute pages in advance; some then take seconds to open"
    add("--cold", action="store_true", help=cold)
    args = parser.parse_args(argv)
    if importlib.util.find_spec("nicegui") is None:
        print("the studio needs NiceGUI: pip install 'nicegui>=3.18,<4'", file=sys.stderr)
        return int(ExitCode.BAD_CONFIG)
    try:
        listening = _listening(args.host, args.port)
    except (OSError, OverflowError) as error:
        print(f"cannot listen on {args.host}:{args.port}: {error}; try --port", file=sys.stderr)
        return int(ExitCode.BAD_CONFIG)
    token = None if args.host in LOOPBACK else secrets.token_urlsafe(24)
    address = _address(args.host, listening.getsockname()[1])
    address += f"?token={token}" if token else ""
    with tempfile.TemporaryDirectory(prefix="studio-") as scratch:
        os.environ["NICEGUI_STORAGE_PATH"] = scratch  # NiceGUI's storage; it keeps no data of ours
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # for optimizers; nothing uses a GPU
        from tools.studio_app.serve import serve

        serve(listening, address, token, args.runs, warm=not args.cold)
    return int(ExitCode.DONE)


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


def _address(host: str, port: int) -> str:
    """Return the address to open; 0.0.0.0 and :: can only be listened on."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"http://[{name}]:{port}/" if ":" in name else f"http://{name}:{port}/"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
