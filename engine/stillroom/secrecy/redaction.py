"""Removes keys from text in every encoding in which a program may repeat them."""

import base64
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

SHORTEST_SECRET = 8
"""A shorter key, such as the `EMPTY` that local servers accept, is a word and no secret."""
MARK = "[key]"
"""The placeholder for a secret."""
_ENCODED = re.compile(rb"%([0-9a-fA-F]{2})|\\+u00([0-9a-fA-F]{2})|\\+/")
"""An escape that may encode a character of a key."""
_PERCENT = re.compile(rb"%[0-9a-fA-F]{2}")
_MOST_ESCAPES = 4
"""How many levels of escaping are undone to find a key."""
_MOST_SPELLED = 64
"""The maximum number of bytes of one character of a key after all levels of escaping."""
_MOST_HELD = 1 << 14
"""The maximum number of bytes of a line that are held back; no encoded key is longer."""
_BASE64_AROUND = rb"[A-Za-z0-9+/_\-]{0,4}"
_BASE64_REST = rb"(?:[A-Za-z0-9+/_\-]|%%(?:25)*2[bBfF]|\\+/|\\+u002[bBfF]){0,%d}+={0,2}"
MOST_COMPARED_BYTES = 256
"""A longer key is recognised by its first bytes alone, and removed in its full length."""
_BLOCK = 1 << 14
_MOST_COMPARED = 100
"""The maximum number of encoded keys of which each is compared with each."""
_ANY_CHARACTER = rb"(?:%%(?:25)*[0-9a-fA-F]{2}|\\+u00[0-9a-fA-F]{2}|\\+/|[^\"\\%b]){0,%d}+"
_LONG_KEY, _MOST_CUT = 16, 32
"""A key of at least `_LONG_KEY` bytes is also recognised when truncated: without its last quarter,
or its last `_MOST_CUT` bytes if that is less."""


class Redactor:
    """Replaces secrets in texts: plain, in base64 at any offset, percent-encoded or JSON-escaped.

    It takes a few substring searches per text, so everything that an endpoint sends can be
    redacted.
    """

    def __init__(self, secrets: Iterable[str | None]) -> None:
        found = {secret for secret in secrets if secret and len(secret) >= SHORTEST_SECRET}
        # The longest first: one key may be the beginning of another.
        self._secrets = sorted(found, key=len, reverse=True)
        self._plain = [secret.encode() for secret in self._secrets]
        beginnings = [key[: _min_recognised_length(key)] for key in self._plain]
        self._encoded = list(
            dict.fromkeys(form for key in beginnings for form in _base64_forms(key))
        )
        self._needles = list(dict.fromkeys([*beginnings, *self._encoded]))
        if len(self._needles) <= _MOST_COMPARED:
            # A needle that contains another one is found by that one.
            self._needles = [
                one for one in self._needles
                if not any(other != one and other in one for other in self._needles)
            ]  # fmt: skip
        longest = max(map(len, self._plain), default=0)
        self.reach = _MOST_SPELLED * min(longest, MOST_COMPARED_BYTES)
        """The maximum number of bytes by which a secret is recognised in any encoding."""

    @functools.cached_property
    def _pattern(self) -> re.Pattern[bytes]:
        # Made when it is needed: it takes milliseconds, and most texts contain no secret.
        return _any_of(self._plain, self._encoded)

    @property
    def secrets(self) -> Sequence[str]:
        """The secrets that are replaced."""
        return self._secrets

    def __or__(self, other: "Redactor") -> "Redactor":
        return Redactor([*self._secrets, *other.secrets])

    def data(self, data: bytes) -> bytes:
        """Returns bytes without the secrets."""
        parts, place = list[bytes](), 0
        for start, end in self.spans(data):
            parts += [data[place:start], MARK.encode()]
            place = end
        return b"".join([*parts, data[place:]]) if parts else data

    def contains_secret(self, data: bytes) -> bool:
        """Returns whether bytes contain a secret in any encoding."""
        if not self._needles:
            return False
        for _ in range(_MOST_ESCAPES):
            if any(needle in data for needle in self._needles):
                return True
            if not _may_be_encoded(data):
                return False
            data = _ENCODED.sub(_decode_escape, data)
        return any(needle in data for needle in self._needles)

    def spans(self, data: bytes) -> list[tuple[int, int]]:
        """Returns the start and end of each secret in bytes, for secrets that are split."""
        if not self.contains_secret(data):
            return []
        spans, place = list[tuple[int, int]](), 0
        # The pattern is slow, so it is used only near a secret.
        for start in range(0, len(data), _BLOCK):
            end = start + _BLOCK + self.reach
            if not self.contains_secret(data[start:end]):
                continue
            for found in self._pattern.finditer(data, max(start, place), end):
                if found.start() >= start + _BLOCK:
                    break
                # A long secret may end behind this stretch.
                whole = self._pattern.match(data, found.start()) or found
                spans.append(whole.span())
                place = whole.end()
        return spans

    def text(self, text: str) -> str:
        """Returns a text without the secrets."""
        if not self._secrets:
            return text
        data = text.encode("utf-8", "surrogatepass")
        clean = self.data(data)
        return text if clean is data else clean.decode("utf-8", "surrogatepass")

    def value(self, value: Any) -> Any:
        """Returns a JSON value without the secrets in its strings and keys."""
        if not self._secrets:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.value(key): self.value(inner) for key, inner in value.items()}
        return [self.value(inner) for inner in value] if isinstance(value, list | tuple) else value


NO_SECRETS = Redactor(())


class RedactedStream:
    """Removes secrets from output that is written in pieces, even if a piece ends inside one.

    The last line is held back until it is complete or long.
    """

    def __init__(self, redactor: Redactor, write: Callable[[bytes], None]) -> None:
        self._redactor, self._write = redactor, write
        self._held = b""

    def write(self, data: bytes) -> None:
        """Writes all complete lines, and holds back the rest."""
        data = self._held + data
        end = data.rfind(b"\n") + 1
        if len(data) - end > _MOST_HELD:
            end = len(data) - _MOST_HELD
            spans = self._redactor.spans(data)
            end = next((start for start, stop in spans if start < end < stop), end)
        self._held = data[end:]
        if end:
            self._write(self._redactor.data(data[:end]))

    def flush(self) -> None:
        """Writes the line that was held back."""
        if self._held:
            self._write(self._redactor.data(self._held))
        self._held = b""


def _base64_forms(key: bytes) -> Iterator[bytes]:
    """Yields the base64 of a key's complete groups of three bytes, at each of three offsets."""
    for skipped in range(3):
        whole = key[skipped : skipped + (len(key) - skipped) // 3 * 3]
        yield base64.b64encode(whole)
        yield base64.urlsafe_b64encode(whole)


def _may_be_encoded(data: bytes) -> bool:
    # Substring searches first: they are a hundred times faster than the pattern.
    if b"\\u00" in data or b"\\/" in data:
        return True
    return b"%" in data and _PERCENT.search(data) is not None


def _decode_escape(escape: re.Match[bytes]) -> bytes:
    digits = escape[1] or escape[2]
    return bytes([int(digits, 16)]) if digits else b"/"


def _min_recognised_length(key: bytes) -> int:
    """Returns how many leading bytes of a key are enough to recognise it."""
    if len(key) > MOST_COMPARED_BYTES:
        return MOST_COMPARED_BYTES
    return len(key) - min(len(key) // 4, _MOST_CUT) if len(key) >= _LONG_KEY else len(key)


def _any_of(plain: Sequence[bytes], encoded: Sequence[bytes]) -> re.Pattern[bytes]:
    # The characters around a base64 form encode the rest of the key.
    longest = max(map(len, plain)) - MOST_COMPARED_BYTES
    rest = _BASE64_REST % (4 + 2 * max(_MOST_CUT, longest))
    around = [_BASE64_AROUND + _encoding_tolerant(form) + rest for form in encoded]
    return re.compile(b"|".join([*map(_truncated_or_whole, plain), *around]))


def _truncated_or_whole(key: bytes) -> bytes:
    """Returns a pattern for a key, and for as much of it as is enough to recognise it."""
    least, rest = _min_recognised_length(key), b""
    if len(key) > MOST_COMPARED_BYTES:
        blank = b"" if any(map(key.__contains__, b" \t")) else rb"\s"
        return _encoding_tolerant(key[:least]) + _ANY_CHARACTER % (blank, len(key) - least)
    for byte in reversed(key[least:]):
        rest = b"(?:%b%b)?" % (_byte_pattern(byte), rest)
    return _encoding_tolerant(key[:least]) + rest


def _encoding_tolerant(needle: bytes) -> bytes:
    """Returns a pattern for bytes, each plain, percent-encoded or JSON-escaped."""
    return b"".join(_byte_pattern(byte) for byte in needle)


def _byte_pattern(byte: int) -> bytes:
    digits = b"".join(
        b"[%c%c]" % (digit, digit ^ 32) if digit >= 0x61 else b"%c" % digit
        for digit in b"%02x" % byte
    )
    plain = re.escape(bytes([byte]))
    slash = rb"|\\+/" if byte == 0x2F else b""
    return rb"(?:%b|%%(?:25)*%b|\\+u00%b%b)" % (plain, digits, digits, slash)


# The words must be complete: AWS_ACCESS_KEY_ID and APIKEY match, but not TOKENIZERS_PARALLELISM
# and max_tokens.
_SECRET_NAME = re.compile(
    r"((KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|JWT|_PAT|_PWD|^PAT)S?|TOKEN"
    r"|(API|ACCESS|AUTH)[-_]?TOKENS)(?=[-_.]|\d|$)|(^|[-_])AUTH(ORIZATION)?$",
    re.IGNORECASE,
)
_NAMES_OF_NAMES = re.compile(r"(^|[-_.])(api_key_env|eos_token|pad_token|bos_token)$|_(HOST|host)$")


@functools.lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Returns whether a variable, option or JSON key with this name usually has a secret value."""
    return _SECRET_NAME.search(name) is not None and not _NAMES_OF_NAMES.search(name)
