"""The studio's server: NiceGUI behind the guard, on a socket that is already bound."""

from __future__ import annotations

import socket
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from nicegui import ui

from harness.report.page import page_of
from tools.studio_app.catalogue import PAGES
from tools.studio_app.guard import Guard
from tools.studio_app.page import read_values
from tools.studio_app.runs import read_run, read_runs_of
from tools.studio_app.view import add_pages


def serve(
    listening: socket.socket,
    token: str | None,
    runs: Path,
    when_ready: Callable[[], None],
    warm: bool,
) -> None:
    """Answer requests until Ctrl-C or SIGTERM. `runs`: the folder of runs that is shown; `warm`:
    compute at once what takes seconds.
    """
    read_runs_of(runs)
    warnings.filterwarnings("ignore", ".*reduce_op", FutureWarning)  # NiceGUI looks at all objects
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    add_pages(PAGES)
    app.get("/report", response_class=HTMLResponse)(report)
    ui.run_with(app, title="Training studio", dark=None, tailwind=False, show_welcome_message=False)
    config = uvicorn.Config(Guard(app, token), log_level="warning", server_header=False)
    server = uvicorn.Server(config)
    if warm:
        threading.Thread(target=_warm_up, daemon=True).start()
    when_ready()
    server.run(sockets=[listening])


def report(run: str = "") -> HTMLResponse:
    """Return the report of a run by its name, as tools/report.py writes it."""
    shown = read_run(run)
    if shown is None:
        return HTMLResponse("there is no run of that name", 404, media_type="text/plain")
    return HTMLResponse(page_of(shown.records))


def _warm_up() -> None:
    """Compute the pages that take seconds at first, so that nobody waits for them."""
    for page in PAGES:
        for query in page.slow_at_first:
            page.figures(read_values(page.controls, query))
