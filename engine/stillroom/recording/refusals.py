"""The proxy's own answers, in a shape that the clients of all APIs show to their users."""

from dataclasses import dataclass
from http import HTTPStatus

import msgspec


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that is not passed on, and why."""

    status: int
    code: str
    problem: str
    fix: str

    def reply(self) -> bytes:
        """Returns the whole reply, after which the connection is closed."""
        text = f"{self.problem}\nfix: {self.fix}"
        error = {"type": "stillroom_record", "code": self.code, "message": text}
        body = msgspec.json.encode({"type": "error", "error": error})
        return (
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
        ).encode() + body

    @classmethod
    def malformed(cls, reason: str) -> "Refused":
        """Returns the answer to what is not HTTP."""
        return cls(400, "malformed", f"the request is no HTTP/1.1: {reason}", "send HTTP/1.1")

    @classmethod
    def long_head(cls, limit: int) -> "Refused":
        """Returns the answer to a head without an end."""
        return cls(
            431, "long_head", f"the head of the request is longer than {limit} bytes",
            "send fewer or shorter headers",
        )  # fmt: skip

    @classmethod
    def no_upgrade(cls) -> "Refused":
        """Returns the answer to a client that wants to speak another protocol."""
        return cls(
            501, "no_upgrade", "WebSockets and other protocols are not passed on",
            "set the proxy's address for calls over HTTP only",
        )  # fmt: skip
