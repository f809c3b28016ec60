"""Which requests are taken: those that name the proxy, show its token and come from no page."""

import hmac
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import quote

from stillroom.recording.heads import TOKEN_HEADER, RequestHead
from stillroom.recording.refusals import Refused
from stillroom.secrecy.own_host import is_own_host, is_own_page

_TOKEN_PATH = "/token/"  # noqa: S105 (the beginning of a path)


@dataclass(frozen=True, slots=True)
class Admission:
    """What a request must show."""

    token: str | None = None
    """None if every program of this machine may call."""
    allowed_hosts: Collection[str] = ()
    """Names in lower case that lead here, beside localhost and the address itself."""

    def admitted(self, head: RequestHead, own_address: str) -> str | Refused:
        """Returns the target without the token, or why the request is not taken."""
        if not head.target.startswith("/"):
            return Refused(
                400, "no_path", "the request names a whole URL, and this is no open proxy",
                "set the address of `stillroom record` as base_url, not as an HTTP proxy",
            )  # fmt: skip
        refused = self._from_elsewhere(head, own_address)
        if refused is not None:
            return refused
        target, shown = head.target, [head.get(TOKEN_HEADER) or b""]
        if target.startswith(_TOKEN_PATH):
            in_path, _, rest = target.removeprefix(_TOKEN_PATH).partition("/")
            target = f"/{rest}"
            shown.append(in_path.encode("latin-1"))
        if self.token is None or any(self._is_token(text) for text in shown):
            return target
        return Refused(
            401, "no_token", "the request shows no token, or not this proxy's",
            "send the header `x-stillroom-token`, or put /token/TOKEN before the path of base_url",
        )  # fmt: skip

    def _is_token(self, shown: bytes) -> bool:
        token = self.token or ""
        return any(
            hmac.compare_digest(shown, form.encode()) for form in (token, quote(token, safe=""))
        )

    def _from_elsewhere(self, head: RequestHead, own_address: str) -> Refused | None:
        hosts = [value.decode("latin-1") for key, value in head.headers if key.lower() == b"host"]
        if len(hosts) != 1 or not is_own_host(hosts[0], own_address, self.allowed_hosts):
            return Refused(
                403, "other_host", f"the Host {', '.join(hosts)!r} is not this proxy",
                "call it by the address it printed, or start it with --allow-host and the name "
                "that leads to it",
            )  # fmt: skip
        for key, value in head.headers:
            if key.lower() == b"origin" and not is_own_page(value.decode("latin-1"), hosts[0]):
                return Refused(
                    403, "other_page", "a page of another site may not call this proxy",
                    "call it from a program, not from a browser",
                )  # fmt: skip
        return None
