"""Serves the page on localhost while jobs run, made again when their files have grown."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError, UsageError

from .page import render
from .page.html import escape
from .sources import read_runs

ADDRESS = "127.0.0.1"
MOST_OF_THE_TIME = 0.2
"""A page that takes long to make is made seldom: at most this share of the time."""
SAFE = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


class LivePage:
    """The newest page; made by whoever asks for it, and by one at a time."""

    def __init__(self, paths: Sequence[Path], every_s: float) -> None:
        self._paths, self._every_s = paths, every_s
        self._mutex, self._page, self._next_s = threading.Lock(), b"", 0.0

    def newest(self) -> bytes:
        """The page as UTF-8; what is wrong with the files is on it in words."""
        with self._mutex:
            began_s = time.monotonic()
            if not self._page or began_s >= self._next_s:
                self._page = self._made().encode()
                now_s = time.monotonic()
                self._next_s = now_s + max(self._every_s / 2, (now_s - began_s) / MOST_OF_THE_TIME)
            return self._page

    def _made(self) -> str:
        try:
            return render(read_runs(self._paths), time.time(), self._every_s)
        except (MoECheckpointError, OSError) as error:
            seconds = max(1, round(self._every_s))
            return (
                f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Run report</title>'
                f'<meta http-equiv="refresh" content="{seconds}"></head><body><main><p>{escape(str(error))}</p>'
                "</main></body></html>"
            )


def server(page: LivePage, port: int) -> ThreadingHTTPServer:
    """A server of the page, ready to `serve_forever`. Raises UsageError for a port that cannot be had.

    Args:
        page: The page to serve.
        port: Port on localhost; 0: any free one.
    """
    try:
        return ThreadingHTTPServer((ADDRESS, port), _handler(page.newest))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"--port {port} of {ADDRESS} cannot be used: {reason}; give another one, or 0 for any"
        ) from None


def _handler(newest: Callable[[], bytes]) -> type[BaseHTTPRequestHandler]:
    class PageHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/":
                self.send_error(404)
                return
            body = newest()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Security-Policy", SAFE)
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are not worth a line."""

    return PageHandler
