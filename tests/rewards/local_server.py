"""An HTTP server on the loopback interface that answers as a test wants."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, dict[str, str], bytes]
Behaviour = Callable[[Any], Answer]


@dataclass
class Asked:
    path: str
    headers: dict[str, str]
    content: Any


@dataclass
class Local:
    behave: Behaviour
    asked: list[Asked] = field(default_factory=list)
    url: str = ""
    at_once: int = 0  # requests that were being answered at the same time, at most
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def counting(self) -> Iterator[None]:
        with self._lock:
            self._now += 1
            self.at_once = max(self.at_once, self._now)
        try:
            yield
        finally:
            with self._lock:
                self._now -= 1


def of_json(content: Any, status: int = 200, **headers: str) -> Answer:
    return status, headers, json.dumps(content).encode()


@contextmanager
def serving(behave: Behaviour) -> Iterator[Local]:
    local = Local(behave)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            local.asked.append(Asked(self.path, dict(self.headers), content))
            with local.counting():
                status, headers, body = local.behave(content)
            try:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except OSError:
                pass  # nobody waits any more

        def log_message(self, *args: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        daemon_threads, request_queue_size = True, 64

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    local.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield local
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
