"""Checks that a request names the proxy in its Host header, has its token and is same-origin."""

import hmac
from collections.abc import Collection
from dataclasses import dataclass
from typing import Self
from urllib.parse import quote

import msgspec
from aiohttp import web

from stillroom.recording.headers import TOKEN_HEADER, RequestHead
from stillroom.secrecy.own_host import is_own_host, is_own_page

_TOKEN_PATH = "/token/"  # noqa: S105 (the beginning of a path)


class RefusedError(Exception):
    """Raised for a request that the proxy answers with an error instead of forwarding it."""

    def __init__(self, status: int, code: str, problem: str, fix: str) -> None:
        super().__init__(status, code, problem, fix)
        self.status, self.code, self.problem, self.fix = status, code, problem, fix

    def response(self) -> web.Response:
        """Returns the error response, in a form that the clients of all recorded APIs display."""
        text = f"{self.problem}\nfix: {self.fix}"
        error = {"type": "stillroom_record", "code": self.code, "message": text}
        return web.Response(
            status=self.status,
            body=msgspec.json.encode({"type": "error", "error": error}),
            content_type="application/json",
            headers={"Cache-Control": "no-store"},
        )

    @classmethod
    def no_reply(cls, problem: str) -> Self:
        """Returns the error for a request that the upstream did not answer."""
        return cls(
            502, "no_reply", f"the upstream did not reply: {problem}",
            "check the network, and the address in `stillroom record --upstream`",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Admission:
    """The token and host names that a request must use."""

    token: str | None = None
    """None if every program on this machine may use the proxy."""
    allowed_hosts: Collection[str] = ()
    """Names of the proxy in lower case, in addition to localhost and its own address."""

    def admit(self, head: RequestHead, own_address: str) -> str:
        """Returns the request target without the token. Raises RefusedError for a bad request.

        `own_address` is the local address of the connection.
        """
        if not head.target.startswith("/"):
            raise RefusedError(
                400, "no_path", "the request target is an absolute URL; this is a reverse proxy",
                "set the address of `stillroom record` as base_url, not as an HTTP proxy",
            )  # fmt: skip
        self._check_host_and_origin(head, own_address)
        if head.headers.get("upgrade", "").lower() == "websocket":
            raise RefusedError(
                501, "no_upgrade", "WebSockets are not supported",
                "use the proxy's address for HTTP calls only",
            )  # fmt: skip
        target, tokens = head.target, [head.headers.get(TOKEN_HEADER, "")]
        if target.startswith(_TOKEN_PATH):
            token, _, path = target.removeprefix(_TOKEN_PATH).partition("/")
            target = f"/{path}"
            tokens.append(token)
        if self.token is None or any(self._is_token(text) for text in tokens):
            return target
        raise RefusedError(
            401, "no_token", "the request does not have this proxy's token",
            "send the header `x-stillroom-token`, or put /token/TOKEN before the path of base_url",
        )  # fmt: skip

    def _is_token(self, text: str) -> bool:
        token = self.token or ""
        forms = (token, quote(token, safe=""))
        return any(hmac.compare_digest(text.encode(), form.encode()) for form in forms)

    def _check_host_and_origin(self, head: RequestHead, own_address: str) -> None:
        """Raises RefusedError if the Host header or the Origin header is not the proxy's."""
        hosts = head.headers.getall("host", [])
        if len(hosts) != 1 or not is_own_host(hosts[0], own_address, self.allowed_hosts):
            raise RefusedError(
                403, "other_host", f"the Host header {', '.join(hosts)!r} does not name this proxy",
                "use the address that the proxy printed, or restart it with --allow-host and this "
                "name",
            )  # fmt: skip
        for origin in head.headers.getall("origin", []):
            if not is_own_page(origin, hosts[0]):
                raise RefusedError(
                    403, "other_page", "web pages of another origin may not call this proxy",
                    "call it from a program, not from a browser",
                )  # fmt: skip
