"""An HTTP server of Python's own, in threads.

def answer(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.end_headers()

with serving(answer) as port: ...
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def serving(answer: Callable[[BaseHTTPRequestHandler], object]) -> Iterator[int]:
    """A server on loopback during the block: its port. `answer` takes each GET and POST."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def body_of(request: BaseHTTPRequestHandler) -> bytes:
    """The request's body, of the length that it tells."""
    return request.rfile.read(int(request.headers["Content-Length"]))


def reply(request: BaseHTTPRequestHandler, status: int, body: bytes, **headers: str) -> None:
    """Answer with a body, of the length that the answer tells."""
    request.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(body)
