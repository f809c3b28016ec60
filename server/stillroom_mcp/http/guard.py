"""Rejects HTTP requests with a wrong token, Host or Origin.

A page in the user's browser can send requests to any port of the machine, and with a DNS name that
resolves to 127.0.0.1 it could read the responses too. So a request must name this server in `Host`,
must not come from a page of another origin, and must have the token.
"""

import hashlib
import hmac
import html
from collections.abc import Iterable
from contextlib import suppress
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from stillroom.secrecy.own_host import is_own_host, is_own_page

_REDIRECT_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>stillroom</title>
<link rel="icon" href="data:,"><meta http-equiv="refresh" content="0;url={address}"></head>
<body><a href="{address}">Continue</a></body></html>
"""
_COOKIE_LIFE_S = 14 * 24 * 3600


class Guard:
    """ASGI middleware that allows only requests that name this server and have its token.

    The token is sent in the header `Authorization: Bearer …`. With `is_for_browsers`, a page can
    also be opened with `?token=…`, which sets a cookie and leads to the same address without the
    token. If `token` is None, every program on this machine may call. `hosts` are names of this
    server in addition to localhost and the addresses that it listens on.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        hosts: Iterable[str] = (),
        is_for_browsers: bool = False,
    ) -> None:
        self._app, self._token, self._is_for_browsers = app, token, is_for_browsers
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forwards a request to the application, or responds with an error that names a fix."""
        if scope["type"] == "http":
            response = self._early_response(scope)
            # Nobody waits for the response to a request whose client left while it was read.
            with suppress(ClientDisconnect):
                await (self._app if response is None else response)(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _early_response(self, scope: Scope) -> Response | None:
        """Returns the response to a request that must not reach the application; otherwise None."""
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_own_host(hosts[0], scope):
            return _error_response(
                403, f"the Host header {', '.join(hosts)!r} does not name this server",
                "use the address that the server printed, or restart it with --allow-host and this "
                "name"
            )  # fmt: skip
        for origin in headers.getlist("origin"):
            if not is_own_page(origin, hosts[0]):
                return _error_response(
                    403, f"a page of {origin!r} may not call this server",
                    "open the page at this server's own address, or call it from a program"
                )  # fmt: skip
        if (response := self._cookie_response(scope)) is not None:
            return response
        if self._token is None or self._has_token(headers, scope):
            return None
        return _error_response(
            401, "the request does not have this server's token",
            "send the header `Authorization: Bearer TOKEN`; the server printed the name of the "
            "file with the token when it started",
        )  # fmt: skip

    def _is_own_host(self, host: str, scope: Scope) -> bool:
        return is_own_host(host, (scope.get("server") or ("",))[0], self._hosts)

    def _has_token(self, headers: Headers, scope: Scope) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._equals_secret(token.strip(), self._token):
            return True
        if not self._is_for_browsers:
            return False
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(_cookie_name(scope))
        except CookieError:
            return False
        return cookie is not None and self._equals_secret(cookie.value, self._cookie_value())

    def _cookie_response(self, scope: Scope) -> Response | None:
        """Returns the response that sets the cookie, if the URL of a page has the token."""
        if not self._is_for_browsers or scope["method"] != "GET":
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if not any(
            name == "token" and self._equals_secret(value, self._token) for name, value in query
        ):
            return None
        other_parameters = urlencode([(name, value) for name, value in query if name != "token"])
        # A path that begins with two slashes would name another host.
        path = "/" + scope["path"].lstrip("/\\")
        address = html.escape(quote(path) + (f"?{other_parameters}" if other_parameters else ""))
        # Not an HTTP redirect: after a link on another site, a browser would follow it without the
        # strict cookie. This page navigates from this server itself.
        response = HTMLResponse(_REDIRECT_PAGE.format(address=address))
        response.set_cookie(
            _cookie_name(scope), self._cookie_value(), max_age=_COOKIE_LIFE_S, httponly=True,
            samesite="strict", path="/",
        )  # fmt: skip
        response.headers["referrer-policy"] = "no-referrer"
        response.headers["cache-control"] = "no-store"
        return response

    def _cookie_value(self) -> str:
        """Returns the value of the cookie: not the token itself, which also allows tool calls."""
        return hmac.new((self._token or "").encode(), b"browser", hashlib.sha256).hexdigest()

    @staticmethod
    def _equals_secret(value: str, secret: str | None) -> bool:
        return secret is not None and hmac.compare_digest(value.encode(), secret.encode())


def _error_response(status: int, problem: str, fix: str) -> Response:
    headers = {"cache-control": "no-store"}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return PlainTextResponse(f"{problem}\nfix: {fix}\n", status_code=status, headers=headers)


def _cookie_name(scope: Scope) -> str:
    """Returns a name with the port, since browsers send a cookie to all ports of a host."""
    server: Any = scope.get("server") or ("", 0)
    return f"stillroom-{server[1]}"
