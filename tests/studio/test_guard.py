"""Requests that a studio must refuse, sent over real sockets."""

import base64
import http.client
import socket
from pathlib import Path

import pytest

from tests.studio.served import Studio, serving
from tests.tables import beside
from tools.studio import _address, _listening

TABLES = beside(__file__, "guard.toml")
PAGE, SOCKET = "/memory", "/_nicegui_ws/socket.io/?EIO=4&transport=polling"


def ask(
    port: int, path: str = PAGE, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], str]:
    """Return (status, headers, body) of a request with the header Sec-Fetch-Site."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, headers=named)
    answer = connection.getresponse()
    body = answer.read().decode("utf-8", "replace")
    connection.close()
    return answer.status, {k.lower(): v for k, v in answer.getheaders()}, body


def upgrade(port: int, **headers: str) -> int:
    """Return the status of an attempt to open a websocket, as browsers do."""
    asks = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
    asks["Sec-WebSocket-Key"] = base64.b64encode(b"0" * 16).decode()
    return ask(port, SOCKET.replace("polling", "websocket"), **asks, **headers)[0]


def test_its_own_pages_are_answered(studio: Studio) -> None:
    """This shows that the refusals below are not accidents of the requests."""
    own = f"http://127.0.0.1:{studio.port}"
    status, _, body = ask(studio.port)
    assert (status, "Formula, source and code" in body) == (200, True)
    assert ask(studio.port, Host="localhost:9000")[0] == 200  # as through a forwarded port
    assert ask(studio.port, SOCKET, Origin=own)[0] == 200
    assert upgrade(studio.port, Origin=own) == 101
    # Followed from a page of another site, or typed.
    assert ask(studio.port, sec_fetch_site="cross-site", sec_fetch_mode="navigate")[0] == 200


@pytest.mark.parametrize(("headers", "refusal"), TABLES["refused"])
def test_other_origins_are_refused(studio: Studio, headers: dict[str, str], refusal: int) -> None:
    for path, method in ((PAGE, "GET"), (SOCKET, "GET"), (SOCKET, "POST")):
        assert ask(studio.port, path, method, **headers)[0] == refusal
    assert upgrade(studio.port, **headers) == refusal


def test_nothing_is_framed_or_read_by_others(studio: Studio) -> None:
    _, headers, _ = ask(studio.port)
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert "default-src 'self'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_studio_server_accepts_only_reads(studio: Studio, method: str) -> None:
    assert ask(studio.port, PAGE, method)[0] == 405


@pytest.mark.parametrize("path", TABLES["paths"])
def test_studio_serves_no_path_outside_its_folders(studio: Studio, path: str) -> None:
    status, _, body = ask(studio.port, path)
    assert status == 404, body[:200]
    assert "root:x:" not in body
    assert "decoder-harness" not in body


@pytest.mark.parametrize(
    ("host", "shown"),
    [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"), ("0.0.0.0", socket.gethostname())],
)
def test_it_listens_on_any_address_and_prints_one_to_open(host: str, shown: str) -> None:
    with _listening(host, 0) as listening:
        port = listening.getsockname()[1]
    assert _address(host, port) == f"http://{shown}:{port}/"


@pytest.mark.gate("pages")
def test_another_address_asks_for_a_token(runs: Path) -> None:
    pytest.importorskip("nicegui")
    with serving(runs, "--host", "0.0.0.0") as studio:
        address, _, token = studio.address.partition("?token=")
        assert len(token) >= 32
        assert address.startswith(f"http://{socket.gethostname()}:")
        wrong = (f"{PAGE}?token={text}" for text in ("", "x", f"{token}x"))
        for attempt in (PAGE, SOCKET, *wrong):
            assert ask(studio.port, attempt)[0] == 403, attempt
        assert upgrade(studio.port) == 403
        assert ask(studio.port, PAGE, Cookie="studio_token=x; ;;=")[0] == 403
        status, headers, _ = ask(studio.port, f"{PAGE}?gpus=8&token={token}")
        assert (status, headers["location"]) == (303, f"{PAGE}?gpus=8")  # removed from the address
        cookie = headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "samesite=strict" in cookie.lower()
        assert ask(studio.port, PAGE, Cookie=cookie.partition(";")[0])[0] == 200
        elsewhere = {"Cookie": cookie.partition(";")[0], "Origin": "http://evil.example"}
        assert ask(studio.port, SOCKET, **elsewhere)[0] == 403
        where = ask(studio.port, f"//evil.example/%0d%0aX-Bad:1?token={token}")[1]
        assert where["location"].startswith("/evil.example")
        assert "x-bad" not in where
