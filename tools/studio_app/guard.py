"""Refuses what a browser must not be made to ask for by other sites, and what has no token.

The studio only reads, and still: a page of another origin must not read along. A name that another
site resolves to this machine (DNS rebinding) is told by the Host header, a request of another
origin by Origin and Sec-Fetch-Site; websockets, whose answers browsers let any origin read, too.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

COOKIE = "studio_token"
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_SOCKET = "/_nicegui_ws/"
"""Where NiceGUI's browser side talks to its server; the only path that is written to."""
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


@dataclass(frozen=True)
class Refusal:
    """A request that is not answered."""

    status: int
    why: str


@dataclass(frozen=True)
class Guard:
    """The application behind its checks. `token`: asked of everybody; None on loopback alone."""

    app: App
    token: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        refusal = self.refusal(scope, headers)
        if refusal is None and self.token is not None and not self._has_cookie(headers):
            if scope["type"] == "http" and _equal(query.pop("token", ""), self.token):
                return await _hand_over_cookie(self.token, scope, query, send)
            refusal = Refusal(403, "open the address that studio.py printed, token included")
        if refusal is not None:
            return await _refuse(refusal, scope, send)
        return await self.app(scope, receive, _with_headers(send))

    def refusal(self, scope: Scope, headers: Mapping[str, str]) -> Refusal | None:
        """Return the reason not to answer, whoever asks."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.token is None and hostname(host) not in LOOPBACK:
            return Refusal(403, f"this address is not the studio's: {host[:100]!r}")
        if origin is not None and urlsplit(origin).netloc != host:
            return Refusal(403, "a page of another origin asks")
        navigates = headers.get("sec-fetch-mode") == "navigate"
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not navigates:
            return Refusal(403, "a page of another site asks")
        method = scope.get("method", "GET")
        if method not in ("GET", "HEAD") and not scope["path"].startswith(_SOCKET):
            return Refusal(405, "the studio only reads")
        return None

    def _has_cookie(self, headers: Mapping[str, str]) -> bool:
        try:
            cookies = SimpleCookie(headers.get("cookie", ""))
        except CookieError:
            return False
        assert self.token is not None
        return COOKIE in cookies and _equal(cookies[COOKIE].value, self.token)


def hostname(host: str) -> str:
    """Return the name in a Host header, without its port; "" for what is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())


async def _hand_over_cookie(token: str, scope: Scope, query: Mapping[str, str], send: Send) -> None:
    """The token leaves the address, which is copied and kept in histories."""
    path = "/" + quote(scope["path"].lstrip("/"))  # "//name" were another host's to a browser
    address = path + (f"?{urlencode(query)}" if query else "")
    cookie = f"{COOKIE}={token}; HttpOnly; SameSite=Strict; Path=/"
    await _answer(send, 303, "", {"location": address, "set-cookie": cookie})


async def _refuse(refusal: Refusal, scope: Scope, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": refusal.why})
        return
    await _answer(send, refusal.status, f"{refusal.why}\n", {})


async def _answer(send: Send, status: int, text: str, headers: Mapping[str, str]) -> None:
    all_headers = {"content-type": "text/plain; charset=utf-8", **_HEADERS, **headers}
    lines = [
        (name.encode(), value.encode("latin-1", "replace")) for name, value in all_headers.items()
    ]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": text.encode()})


def _with_headers(send: Send) -> Send:
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            lines = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
            message["headers"] = [*message.get("headers", []), *lines]
        await send(message)

    return sending
