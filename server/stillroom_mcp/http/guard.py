"""Decides which HTTP requests reach an application: by their token, Host and Origin.

A page in the user's browser can send requests to any port of the machine, and with a name that it
makes resolve to 127.0.0.1 it could read the answers too. So a request must name this server in
`Host`, come from a page of this server if it comes from a page, and show the token.
"""

import hashlib
import hmac
import html
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from stillroom.secrecy.own_host import is_own_host, is_own_page

_LEADS_ON = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>stillroom</title>
<link rel="icon" href="data:,"><meta http-equiv="refresh" content="0;url={address}"></head>
<body><a href="{address}">Go on</a></body></html>
"""
_COOKIE_LIFE_S = 14 * 24 * 3600


class Guard:
    """ASGI middleware that lets a request through if it names this server and shows its token.

    The token stands in the header `Authorization: Bearer …`. With `is_for_browsers` a page can be
    opened with `?token=…` too: that sets a cookie, which then replaces the token, and leads to
    the same address without it. Without a token (None) everybody on this machine may call.
    `hosts` are names of this server in addition to localhost and the addresses it listens on.
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
        """Passes a request on, or answers it with a refusal that says what to do."""
        if scope["type"] == "http":
            answer = self._answer(scope)
            await (self._app if answer is None else answer)(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _answer(self, scope: Scope) -> Response | None:
        """Returns the refusal of a request, or None if it may reach the application."""
        headers = Headers(scope=scope)
        named = headers.getlist("host")
        if len(named) != 1 or not self._is_own_host(named[0], scope):
            return _refusal(
                403, f"the Host {', '.join(named)!r} is not this server", "call it by the address "
                "it printed, or start it with --allow-host and the name that leads to it"
            )  # fmt: skip
        for origin in headers.getlist("origin"):
            if not is_own_page(origin, named[0]):
                return _refusal(
                    403, f"a page of {origin!r} may not call this server",
                    "open the page from this server's own address, or call it from no browser"
                )  # fmt: skip
        if entrance := self._entrance(scope):
            return entrance
        if self._token is None or self._is_shown(headers, scope):
            return None
        return _refusal(
            401, "the request shows no token, or not this server's",
            "send the header `Authorization: Bearer TOKEN`; the server's first lines name the "
            "file that holds the token",
        )  # fmt: skip

    def _is_own_host(self, named: str, scope: Scope) -> bool:
        return is_own_host(named, (scope.get("server") or ("",))[0], self._hosts)

    def _is_shown(self, headers: Headers, scope: Scope) -> bool:
        scheme, _, shown = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_secret(shown.strip(), self._token):
            return True
        if not self._is_for_browsers:
            return False
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(_cookie_name(scope))
        except CookieError:
            return False
        return cookie is not None and self._is_secret(cookie.value, self._cookie_value())

    def _entrance(self, scope: Scope) -> Response | None:
        """Returns the answer that sets the cookie, if the address of a page shows the token."""
        if not self._is_for_browsers or scope["method"] != "GET":
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if not any(
            name == "token" and self._is_secret(value, self._token) for name, value in query
        ):
            return None
        rest = urlencode([(name, value) for name, value in query if name != "token"])
        # Two slashes at the start would be the name of another host.
        path = "/" + scope["path"].lstrip("/\\")
        address = html.escape(quote(path) + (f"?{rest}" if rest else ""))
        # Not a redirect: where a page of another site leads here, a browser follows redirects
        # without a strict cookie. This page leads on by itself, from this server.
        answer = HTMLResponse(_LEADS_ON.format(address=address))
        answer.set_cookie(
            _cookie_name(scope), self._cookie_value(), max_age=_COOKIE_LIFE_S, httponly=True,
            samesite="strict", path="/",
        )  # fmt: skip
        answer.headers["referrer-policy"] = "no-referrer"
        answer.headers["cache-control"] = "no-store"
        return answer

    def _cookie_value(self) -> str:
        """Returns what the cookie holds: not the token itself, with which tools can be called."""
        return hmac.new((self._token or "").encode(), b"browser", hashlib.sha256).hexdigest()

    @staticmethod
    def _is_secret(shown: str, secret: str | None) -> bool:
        return secret is not None and hmac.compare_digest(shown.encode(), secret.encode())


def _refusal(status: int, problem: str, fix: str) -> Response:
    headers = {"cache-control": "no-store"}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return PlainTextResponse(f"{problem}\nfix: {fix}\n", status_code=status, headers=headers)


def _cookie_name(scope: Scope) -> str:
    """Returns a name with the port in it: a browser sends a host's cookies to all its ports."""
    server: Any = scope.get("server") or ("", 0)
    return f"stillroom-{server[1]}"
