"""A real headless Chromium, driven through its DevTools protocol.

    with Browser() as browser:
        page = browser.open(url, width=390, dark=True)
        page.evaluate("document.title"), page.errors, page.requests, page.screenshot(path)

Tests that need it begin with `needs_browser`, a mark that skips them with the reason.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from harness.launch.ranks import start

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE_S = 180
WIDTHS = (1280, 390)
"""A laptop and a phone, in CSS pixels."""
SHOWN = "!!document.querySelector('.figures .card, .figures .number, .figures .chart')"
"""True once a page of the studio shows figures."""
OVERFLOWS = "document.documentElement.scrollWidth > document.documentElement.clientWidth"


def missing() -> str:
    """Return the reason why no browser can be driven here; "" if one can."""
    if CHROMIUM is None:
        return "needs Chromium: apt-get install chromium"
    if importlib.util.find_spec("websockets") is None:
        return "needs websockets: pip install websockets"
    return ""


needs_browser = pytest.mark.skipif(bool(missing()), reason=missing())


class Browser:
    """A headless browser process with a fresh profile and no background network traffic."""

    def __enter__(self) -> Browser:
        from websockets.sync.client import connect

        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        command = [
            CHROMIUM or "chromium",
            "--headless=new",
            "--remote-debugging-port=0",
            f"--user-data-dir={self._profile.name}",
            *("--no-first-run", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
            "about:blank",
        ]
        self._process = start(command, None, logs=Path(self._profile.name), env={})
        self._stack = contextlib.ExitStack()
        self._stack.callback(self._profile.cleanup)
        self._stack.callback(self._process.end)
        try:
            address = self._address()
            # No pings: on a busy machine a browser may not answer for 20 s.
            connection = connect(
                address, proxy=None, max_size=None, open_timeout=PATIENCE_S, ping_interval=None
            )
            self._socket = self._stack.enter_context(connection)
        except BaseException:
            self._stack.close()
            raise
        self._number = 0
        self._pages: dict[str, Page] = {}
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _address(self) -> str:
        """Return the socket that Chromium writes to its profile when it listens."""
        port_file = Path(self._profile.name, "DevToolsActivePort")
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and not self._process.ended:
            lines = port_file.read_text().split() if port_file.exists() else []
            if len(lines) == 2:
                return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
            time.sleep(0.05)
        raise RuntimeError(f"Chromium did not start: {self._process.logs[0].read_text()}")

    def open(self, url: str, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """Load a page in a new tab until its `load` event."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, target)
        page.call("Page.enable")
        page.call("Runtime.enable")
        page.call("Log.enable")
        page.call("Network.enable")
        page.resize(width, height)
        page.color_scheme(dark)
        page.go(url)
        return page

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send one DevTools command; return its result."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params}
        self._socket.send(json.dumps(message | ({"sessionId": session} if session else {})))
        while True:
            answer = json.loads(self._socket.recv(timeout=PATIENCE_S))
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def listen(self, seconds: float) -> None:
        """Process events for some seconds."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                self._note(json.loads(self._socket.recv(timeout=left)))
            except TimeoutError:
                return

    def _note(self, message: dict[str, Any]) -> None:
        if page := self._pages.get(message.get("sessionId", "")):
            page.note(message["method"], message["params"])


class Page:
    """A tab: its content and its errors."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser = browser
        self._target = target
        self._session = session
        self._loaded = False
        self.errors: list[str] = []
        """Console errors, uncaught exceptions and failed requests."""
        self.requests: list[str] = []
        """Every requested URL, the page's own first."""

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a DevTools command to this tab."""
        return self._browser.call(method, self._session, **params)

    def go(self, url: str) -> None:
        """Load another address until its `load` event."""
        self._loaded = False
        failure = self.call("Page.navigate", url=url).get("errorText")
        if failure:
            raise RuntimeError(f"{url}: {failure}")
        deadline = time.monotonic() + PATIENCE_S
        while not self._loaded:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{url} did not load in {PATIENCE_S} s")
            self._browser.listen(0.05)

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression, awaited if it is a promise."""
        result = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(f"{script}: {_described(result['exceptionDetails'])}")
        return result["result"].get("value")

    def wait_for(self, script: str, seconds: float = PATIENCE_S) -> Any:
        """Return the value of an expression once it is truthy."""
        deadline = time.monotonic() + seconds
        while not (value := self.evaluate(script)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not true in {seconds} s: {script}; {self.errors}")
            self._browser.listen(0.05)
        return value

    def click(self, selector: str) -> None:
        """Click on the middle of an element, as a mouse does."""
        x, y = self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def hover(self, selector: str) -> None:
        """Move the mouse to the middle of an element."""
        x, y = self.middle(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        """Press and release one key on the element with the focus, as in "ArrowRight" or "Tab"."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}
        codes |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        code = codes.get(key, ord(key[0].upper()))
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if kind == "keyDown" and len(key) == 1 else {}
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text
            )

    def middle(self, selector: str) -> tuple[float, float]:
        """Scroll to an element; return the middle of its visible part."""
        place = self.evaluate(
            f"(() => {{const e = document.querySelector({json.dumps(selector)}); if (!e) return;"
            "e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const r = e.getBoundingClientRect();"
            "return [(r.left + r.right) / 2, (r.top + r.bottom) / 2]})()"
        )
        if place is None:
            raise LookupError(f"the page has no {selector}")
        return place[0], place[1]

    def close(self) -> None:
        """Close the tab."""
        self._browser.call("Target.closeTarget", targetId=self._target)

    def resize(self, width: int, height: int = 900) -> None:
        """Set the page's width in CSS pixels; below 600, emulate a phone."""
        size: dict[str, Any] = {"width": width, "height": height, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", deviceScaleFactor=1, **size)

    def color_scheme(self, dark: bool) -> None:
        """Set prefers-color-scheme."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        """Write a PNG of the whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        area = {**size, "scale": 1}
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=area)["data"]
        path.write_bytes(base64.b64decode(data))

    @property
    def overflows(self) -> bool:
        """Return True if the page must be scrolled sideways."""
        return bool(self.evaluate(OVERFLOWS))

    def note(self, method: str, params: dict[str, Any]) -> None:
        """Process one event."""
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(_described(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(" ".join(str(arg.get("value", arg)) for arg in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


def _described(details: dict[str, Any]) -> str:
    return str(details.get("exception", {}).get("description") or details["text"])
