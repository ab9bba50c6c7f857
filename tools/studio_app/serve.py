"""The studio's server: NiceGUI behind a guard, on a socket that is already bound.

The studio only reads, but other origins must not read through it. DNS rebinding, where another site
resolves its name to this machine, shows in the Host header, a request from another origin in Origin
and Sec-Fetch-Site. Websockets are also checked, since browsers let any origin read them.
"""

import hmac
import socket
import threading
import warnings
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit

import uvicorn
from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from nicegui import ui
from starlette.datastructures import MutableHeaders
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from harness.report.page import page_of
from tools.studio_app.lessons import PAGES
from tools.studio_app.page import read_values
from tools.studio_app.runs import read_run, read_runs_of
from tools.studio_app.view import add_pages

COOKIE = "studio_token"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_SOCKET = "/_nicegui_ws/"
"""Path of NiceGUI's connection to the browser; the only path that accepts writes."""
_HEADERS = {
    # Vue compiles templates, and NiceGUI sends scripts within its pages.
    "content-security-policy": "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; "
    "frame-ancestors 'none'; base-uri 'self'; form-action 'self'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class Guard:
    """The application behind its checks. Every browser must send `token`; None only on loopback."""

    def __init__(self, app: ASGIApp, token: str | None = None) -> None:
        self.token = token
        # Without a token, answer only to the names of this machine.
        hosts = LOOPBACK if token is None else ("*",)
        self.app = TrustedHostMiddleware(app, hosts, www_redirect=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or reject a request."""

        async def sending(message: Message) -> None:
            if message["type"].endswith("response.start"):
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        is_request = scope["type"] != "lifespan"
        refusal = self._refusal(HTTPConnection(scope)) if is_request else None
        await (refusal or self.app)(scope, receive, sending)

    def _refusal(self, request: HTTPConnection) -> Response | None:
        """Return the answer to a request that must not reach the studio; None to let it through."""
        headers = request.headers
        origin, mode = headers.get("origin"), headers.get("sec-fetch-mode")
        if origin is not None and urlsplit(origin).netloc != headers.get("host"):
            return _refused(403, "a page of another origin asks")
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and mode != "navigate":
            return _refused(403, "a page of another site asks")
        path, method = request.scope["path"], request.scope.get("method", "GET")
        if method not in ("GET", "HEAD") and not path.startswith(_SOCKET):
            return _refused(405, "the studio only reads")
        if self.token is None or _equal(request.cookies.get(COOKIE, ""), self.token):
            return None
        query = dict(request.query_params)
        if request.scope["type"] == "http" and _equal(query.pop("token", ""), self.token):
            # Remove the token from the address, which is copied and kept in histories. A browser
            # would take "//name" for another host.
            address = "/" + quote(path.lstrip("/")) + (f"?{urlencode(query)}" if query else "")
            answer = RedirectResponse(address, 303)
            answer.set_cookie(COOKIE, self.token, httponly=True, samesite="strict")
            return answer
        return _refused(403, "open the address that studio.py printed, token included")


def _refused(status: int, why: str) -> Response:
    return PlainTextResponse(f"{why}\n", status)


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())


def serve(
    listening: socket.socket, address: str, token: str | None, runs: Path, warm: bool
) -> None:
    """Print the address, and serve until Ctrl-C or SIGTERM. `warm`: compute slow pages now."""
    read_runs_of(runs)
    warnings.filterwarnings("ignore", ".*reduce_op", FutureWarning)  # NiceGUI inspects all objects
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    add_pages(PAGES)
    app.get("/report", response_class=HTMLResponse)(report)
    ui.run_with(app, title="Training studio", dark=None, tailwind=False, show_welcome_message=False)
    config = uvicorn.Config(Guard(app, token), log_level="warning", server_header=False)
    server = uvicorn.Server(config)
    if warm:
        threading.Thread(target=_warm_up, daemon=True).start()
    print(f"studio: {address}", flush=True)
    server.run(sockets=[listening])


def report(run: str = "") -> HTMLResponse:
    """Return a run's report by its name, as tools/report.py writes it."""
    shown = read_run(run)
    if shown is None:
        return HTMLResponse("there is no run of that name", 404, media_type="text/plain")
    return HTMLResponse(page_of(shown.records))


def _warm_up() -> None:
    """Compute slow pages in advance, so that nobody waits for them."""
    for page in PAGES:
        for query in page.slow_at_first:
            page.figures(read_values(page.controls, query))
