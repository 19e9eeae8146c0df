"""A server that plays anything: it says given bytes, at a given pace, whatever it is asked."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

Talk = Callable[[], Iterable[bytes]]


def response(body: bytes, *lines: str, status: str = "200 OK", length: int | None = -1) -> bytes:
    """A whole answer. length: that it announces; -1 the body's, None none."""
    announced = len(body) if length == -1 else length
    head = [f"HTTP/1.1 {status}", "connection: close", *lines]
    head += [] if announced is None else [f"content-length: {announced}"]
    return "\r\n".join([*head, "", ""]).encode("latin-1") + body


class Hostile:
    """talk: what the next connections hear; it may be changed. sent: bytes so far."""

    def __init__(self, talk: Talk, pause: float) -> None:
        self.talk, self.pause, self.sent, self.asked = talk, pause, 0, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.asked += 1
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                piece = connection.recv(65536)
                if not piece:
                    return
                head += piece
            for piece in self.talk():
                connection.sendall(piece)
                self.sent += len(piece)
                time.sleep(self.pause)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(2)
            while connection.recv(2**20):  # the rest of the request: else a reset eats the answer
                pass

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@contextmanager
def saying(talk: Talk = list, pause: float = 0.0) -> Iterator[Hostile]:
    """A server that says the pieces of `talk()` to whoever asks, `pause` seconds apart."""
    server = Hostile(talk, pause)
    try:
        yield server
    finally:
        server.close()
