"""A TCP proxy in front of a loopback sshd: counts what passes, cuts connections, and is down at will."""

import selectors
import socket
import threading
import time
from contextlib import suppress

_BLOCK = 1 << 16


class Wire:
    """The network between here and there. `sent` and `received` are bytes, as the side here sees them."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.sent = self.received = self.num_cuts = self.num_connections = 0
        self.is_down = False
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> int:
        """Breaks all connections as a network does that goes away; returns how many there were."""
        with self._lock:
            pairs, self._pairs = self._pairs, set()
        for pair in pairs:
            for end in pair:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
        self.num_cuts += bool(pairs)
        return len(pairs)

    def down(self, seconds: float) -> None:
        """Cuts, and lets nothing through for a while."""
        self.is_down = True
        self.cut()
        time.sleep(seconds)
        self.is_down = False

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            if self.is_down:
                here.close()
                continue
            try:
                there = socket.create_connection(("127.0.0.1", self.target), timeout=5)
            except OSError:
                here.close()
                continue
            there.settimeout(None)
            self.num_connections += 1
            with self._lock:
                self._pairs.add((here, there))
            threading.Thread(target=self._carry, args=(here, there), daemon=True).start()

    def _carry(self, here: socket.socket, there: socket.socket) -> None:
        """Passes bytes both ways; what one side cannot take yet holds the other back."""
        with selectors.DefaultSelector() as selector, suppress(OSError, ValueError, KeyError):
            selector.register(here, selectors.EVENT_READ, there)
            selector.register(there, selectors.EVENT_READ, here)
            while True:
                for key, _ in selector.select(timeout=5):
                    data = key.fileobj.recv(_BLOCK)
                    if not data:
                        raise OSError
                    key.data.sendall(data)
                    if key.fileobj is here:
                        self.sent += len(data)
                    else:
                        self.received += len(data)
        with self._lock:
            self._pairs.discard((here, there))
        here.close()
        there.close()
