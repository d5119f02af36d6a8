"""The page on loopback, made anew as runs go on: `report --serve`.

Others on this machine can reach loopback, and pages of other sites can make a browser ask there:
only who knows the address with its token is answered, and only under that host's name.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

from orchestrator.errors import OrchestratorError

HOST = "127.0.0.1"
FRESH_S = 5.0


class Server(ThreadingHTTPServer):
    """Answers one address, `url`, with what `make` gives; asked more often, with what it gave.

    Args:
        make: the page as text, for browsers that ask again every `FRESH_S`.
        port: 0: any that is free.
    """

    daemon_threads = True

    def __init__(self, make: Callable[[], str], port: int = 0) -> None:
        super().__init__((HOST, port), _Handler)
        self._make = make
        self._page: tuple[float, bytes] | None = None
        self.token = secrets.token_urlsafe(16)
        self.host = f"{HOST}:{self.server_address[1]}"
        self.url = f"http://{self.host}/{self.token}/"

    def page(self) -> bytes:
        """The page, at most `FRESH_S` old."""
        if self._page is None or time.monotonic() - self._page[0] > FRESH_S / 2:
            self._page = (time.monotonic(), self._make().encode())
        return self._page[1]


class _Handler(BaseHTTPRequestHandler):
    timeout = 30

    def do_GET(self) -> None:
        asked = self.path.strip("/").encode("utf-8", "replace")
        server = cast("Server", self.server)
        known = hmac.compare_digest(asked, server.token.encode())
        if not known or self.headers.get("Host") != server.host:
            self.send_error(404)
            return
        try:
            page = server.page()
        except OrchestratorError as error:  # the run's folder was damaged or removed meanwhile
            self.send_error(503, explain=str(error))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as inherited
        """Nothing: who looks is no news."""
