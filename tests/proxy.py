"""An HTTP proxy that does to requests what networks and servers do: a real one, on this machine.

500 503 409   an error in place of the answer; nothing reached the server
reset         the connection is reset: before a put, in the middle of an answer's body
short         an answer's body ends early
lost          the server did what was asked for, and its answer never arrives
wrong         a byte of an object is changed, on its way here or there
slow          the answer trickles
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import http.server
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

FAULTS = ("500", "503", "409", "reset", "short", "lost", "wrong", "slow")
# Which fault a request meets: its method and path decide, and whatever else the experiment knows.
Choose = Callable[[str, str], str]


@dataclass
class Proxy:
    """A proxy that runs. `hold` gets path and range of a request, which waits until it comes back.

    `ignores_conditions` makes the store behind it one that knows no conditional puts.
    """

    endpoint: str
    choose: Choose = lambda method, path: ""
    hold: Callable[[str, str], object] = lambda path, wanted: None
    ignores_conditions: bool = False
    injected: Counter[str] = field(default_factory=Counter)
    requests: int = 0


@contextlib.contextmanager
def fault_proxy(target: str) -> Iterator[Proxy]:
    """A proxy before a server, for as long as the block lasts."""
    host, port = target.removeprefix("http://").split(":")
    proxy = Proxy("")
    lock = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            proxy.hold(self.path, self.headers.get("Range", ""))
            with lock:
                proxy.requests += 1
                fault = fitting(proxy.choose(self.command, self.path), self.command, body)
                if fault:
                    proxy.injected[fault] += 1
            if fault.isdecimal():
                self.answer(int(fault), [], b"<Error><Code>Injected</Code></Error>")
            elif fault == "reset" and body:
                self.reset()
            elif fault == "wrong" and body:
                self.send_wrong(body)
            else:
                self.pass_on(body, fault)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any

        def pass_on(self, body: bytes, fault: str) -> None:
            status, headers, data = self.ask(body)
            if fault == "lost":
                self.close_connection = True
                return
            if fault == "wrong" and data:
                place = len(data) // 2
                data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
            self.answer(status, headers, data, fault)

        def ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
            connection = http.client.HTTPConnection(host, int(port), timeout=60)
            headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
            if proxy.ignores_conditions:
                headers = {
                    name: value for name, value in headers.items() if not name.lower().startswith(("if-", "x-goog-if-"))
                }
            try:
                connection.request(self.command, self.path, body or None, headers)
                found = connection.getresponse()
                return found.status, found.getheaders(), found.read()
            finally:
                connection.close()

        def send_wrong(self, body: bytes) -> None:
            """What a store does with bytes that are not those of their checksum: refuse them. moto takes them."""
            said = self.headers.get("x-amz-checksum-sha256")
            changed = bytes([body[0] ^ 1]) + body[1:]
            if said is not None and said != base64.b64encode(hashlib.sha256(changed).digest()).decode():
                self.answer(400, [], b"<Error><Code>BadDigest</Code></Error>")
            else:
                self.pass_on(changed, "")

        def answer(self, status: int, headers: list[tuple[str, str]], data: bytes, fault: str = "") -> None:
            self.send_response_only(status)
            kept = ("content-length", "transfer-encoding", "connection")
            is_head = self.command == "HEAD"
            size = next((value for name, value in headers if name.lower() == "content-length"), "0")
            for name, value in headers:
                if name.lower() not in kept:
                    self.send_header(name, value)
            self.send_header("Content-Length", size if is_head else str(len(data)))
            self.end_headers()
            if is_head:
                return
            if fault in ("reset", "short"):
                self.wfile.write(data[: len(data) // 2])
                self.wfile.flush()
                if fault == "reset":
                    self.reset()
                self.close_connection = True
            elif fault == "slow":
                for start in range(0, max(len(data), 1), max(len(data) // 5, 1)):
                    self.wfile.write(data[start : start + max(len(data) // 5, 1)])
                    self.wfile.flush()
                    time.sleep(0.02)
            else:
                self.wfile.write(data)

        def reset(self) -> None:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def handle(self) -> None:
            with contextlib.suppress(OSError, ValueError):  # a client that went away, or a connection that we reset
                super().handle()

        def finish(self) -> None:
            with contextlib.suppress(OSError, ValueError):
                super().finish()

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

        def shutdown_request(self, request: Any) -> None:
            with contextlib.suppress(OSError):
                super().shutdown_request(request)

    server = Server(("127.0.0.1", 0), Handler)
    proxy.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def fitting(fault: str, method: str, body: bytes) -> str:
    """The fault if it can happen to such a request, else none."""
    if fault in ("short", "slow") and method != "GET":
        return ""
    if fault == "wrong" and method != "GET" and not (method == "PUT" and body):
        return ""
    if fault == "reset" and method not in ("GET", "PUT", "POST"):
        return ""
    return fault


def at_random(chance: random.Random, rate: float, faults: tuple[str, ...] = FAULTS, spare: str = "") -> Choose:
    """Faults at a share of all requests. Objects with `spare` in their key keep their bytes, as nothing tells them."""

    def choose(method: str, path: str) -> str:
        if chance.random() >= rate:
            return ""
        fault = chance.choice(faults)
        # Listings are not hashed either, and a store sends them over an encrypted line.
        blind = "list-type" in path or (spare and spare in path) or "uploads" in path or "uploadId" in path
        return "503" if fault == "wrong" and blind else fault

    return choose
