"""Removes secrets from texts, in every encoding in which a program may repeat them."""

import base64
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

SHORTEST_SECRET = 8
"""A shorter key, such as the `EMPTY` that local servers accept, is not treated as a secret."""
MARK = "[key]"
"""The placeholder for a secret."""
_ENCODED = re.compile(rb"%([0-9a-fA-F]{2})|\\+u00([0-9a-fA-F]{2})|\\+/")
"""An escape that may encode a character of a key."""
_PERCENT = re.compile(rb"%[0-9a-fA-F]{2}")
_MAX_ESCAPE_LEVELS = 4
"""How many levels of escaping are decoded to find a key."""
_MAX_ESCAPED_BYTES = 64
"""The maximum length in bytes of one character of a key after all levels of escaping."""
_MAX_HELD_BYTES = 1 << 14
"""The maximum number of bytes of a line that are held back; no encoded key is longer."""
_BASE64_AROUND = rb"[A-Za-z0-9+/_\-]{0,4}"
_BASE64_REST = rb"(?:[A-Za-z0-9+/_\-]|%%(?:25)*2[bBfF]|\\+/|\\+u002[bBfF]){0,%d}+={0,2}"
MAX_COMPARED_BYTES = 256
"""A longer key is recognised by its first bytes alone, and removed in its full length."""
_BLOCK = 1 << 14
_MAX_DEDUPLICATED = 100
"""With more encoded keys than this, they are not compared in pairs to find redundant ones."""
_ANY_CHARACTER = rb"(?:%%(?:25)*[0-9a-fA-F]{2}|\\+u00[0-9a-fA-F]{2}|\\+/|[^\"\\%b]){0,%d}+"
_LONG_KEY, _MAX_CUT_BYTES = 16, 32
"""A key of at least `_LONG_KEY` bytes is also recognised when truncated: without its last quarter,
or its last `_MAX_CUT_BYTES` bytes if that is less."""


class Redactor:
    """Replaces secrets in texts: plain, in base64 at any offset, percent-encoded or JSON-escaped.

    Scanning a text takes a few substring searches, which is fast enough for everything that an
    endpoint sends.
    """

    def __init__(self, secrets: Iterable[str | None]) -> None:
        distinct = {secret for secret in secrets if secret and len(secret) >= SHORTEST_SECRET}
        # The longest first: one key may be the beginning of another.
        self._secrets = sorted(distinct, key=len, reverse=True)
        self._plain = [secret.encode() for secret in self._secrets]
        beginnings = [key[: _min_recognised_length(key)] for key in self._plain]
        self._encoded = list(
            dict.fromkeys(form for key in beginnings for form in _base64_forms(key))
        )
        self._needles = list(dict.fromkeys([*beginnings, *self._encoded]))
        if len(self._needles) <= _MAX_DEDUPLICATED:
            # A text with a needle that contains another needle is found by the shorter one.
            self._needles = [
                needle for needle in self._needles
                if not any(other != needle and other in needle for other in self._needles)
            ]  # fmt: skip
        longest = max(map(len, self._plain), default=0)
        self.reach = _MAX_ESCAPED_BYTES * min(longest, MAX_COMPARED_BYTES)
        """The maximum length in bytes of the part of an encoded secret that identifies it."""

    @functools.cached_property
    def _pattern(self) -> re.Pattern[bytes]:
        # Compiled on first use: it takes milliseconds, and most texts contain no secret.
        return _pattern_of(self._plain, self._encoded)

    @property
    def secrets(self) -> Sequence[str]:
        """The secrets that are replaced."""
        return self._secrets

    def __or__(self, other: "Redactor") -> "Redactor":
        return Redactor([*self._secrets, *other.secrets])

    def redact_bytes(self, data: bytes) -> bytes:
        """Returns bytes with `MARK` in place of each secret; the same object if there is none."""
        parts, done = list[bytes](), 0
        for start, end in self.spans(data):
            parts += [data[done:start], MARK.encode()]
            done = end
        return b"".join([*parts, data[done:]]) if parts else data

    def contains_secret(self, data: bytes) -> bool:
        """Returns whether bytes contain a secret in any encoding."""
        if not self._needles:
            return False
        for _ in range(_MAX_ESCAPE_LEVELS):
            if any(needle in data for needle in self._needles):
                return True
            if not _may_be_encoded(data):
                return False
            data = _ENCODED.sub(_decode_escape, data)
        return any(needle in data for needle in self._needles)

    def spans(self, data: bytes) -> list[tuple[int, int]]:
        """Returns the start and end of each secret in bytes, in any encoding."""
        if not self.contains_secret(data):
            return []
        spans, done = list[tuple[int, int]](), 0
        # The pattern is slow, so it is used only near a secret.
        for start in range(0, len(data), _BLOCK):
            end = start + _BLOCK + self.reach
            if not self.contains_secret(data[start:end]):
                continue
            for found in self._pattern.finditer(data, max(start, done), end):
                if found.start() >= start + _BLOCK:
                    break
                # A long secret may end after this block.
                match = self._pattern.match(data, found.start()) or found
                spans.append(match.span())
                done = match.end()
        return spans

    def redact_text(self, text: str) -> str:
        """Returns a text with `MARK` in place of each secret."""
        if not self._secrets:
            return text
        data = text.encode("utf-8", "surrogatepass")
        clean = self.redact_bytes(data)
        return text if clean is data else clean.decode("utf-8", "surrogatepass")

    def redact_value(self, value: Any) -> Any:
        """Returns a JSON value with `MARK` in place of each secret in its strings and names."""
        if not self._secrets:
            return value
        if isinstance(value, str):
            return self.redact_text(value)
        if isinstance(value, dict):
            return {
                self.redact_value(key): self.redact_value(inner) for key, inner in value.items()
            }
        return (
            [self.redact_value(inner) for inner in value]
            if isinstance(value, list | tuple)
            else value
        )


NO_SECRETS = Redactor(())


class RedactedStream:
    """Removes secrets from output that is written in pieces, even if a piece ends within a secret.

    The last line is held back until it is complete or long.
    """

    def __init__(self, redactor: Redactor, write: Callable[[bytes], None]) -> None:
        self._redactor, self._write = redactor, write
        self._held = b""

    def write(self, data: bytes) -> None:
        """Writes all complete lines, and holds back the rest."""
        data = self._held + data
        end = data.rfind(b"\n") + 1
        if len(data) - end > _MAX_HELD_BYTES:
            end = len(data) - _MAX_HELD_BYTES
            spans = self._redactor.spans(data)
            end = next((start for start, stop in spans if start < end < stop), end)
        self._held = data[end:]
        if end:
            self._write(self._redactor.redact_bytes(data[:end]))

    def flush(self) -> None:
        """Writes the line that was held back."""
        if self._held:
            self._write(self._redactor.redact_bytes(self._held))
        self._held = b""


def _base64_forms(key: bytes) -> Iterator[bytes]:
    """Yields the base64 of a key without its first 0, 1 or 2 bytes, in whole groups of 3 bytes.

    In the base64 of a longer text, the key appears in one of these forms.
    """
    for skipped in range(3):
        groups = key[skipped : skipped + (len(key) - skipped) // 3 * 3]
        yield base64.b64encode(groups)
        yield base64.urlsafe_b64encode(groups)


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
    if len(key) > MAX_COMPARED_BYTES:
        return MAX_COMPARED_BYTES
    return len(key) - min(len(key) // 4, _MAX_CUT_BYTES) if len(key) >= _LONG_KEY else len(key)


def _pattern_of(plain: Sequence[bytes], encoded: Sequence[bytes]) -> re.Pattern[bytes]:
    """Returns a pattern for any of these keys, plain or in one of the base64 forms `encoded`."""
    # The characters around a base64 form encode the rest of the key.
    longest = max(map(len, plain)) - MAX_COMPARED_BYTES
    rest = _BASE64_REST % (4 + 2 * max(_MAX_CUT_BYTES, longest))
    around = [_BASE64_AROUND + _encoding_tolerant(form) + rest for form in encoded]
    return re.compile(b"|".join([*map(_truncatable_pattern, plain), *around]))


def _truncatable_pattern(key: bytes) -> bytes:
    """Returns a pattern for a key, which may be truncated after the part that identifies it."""
    length, rest = _min_recognised_length(key), b""
    if len(key) > MAX_COMPARED_BYTES:
        blank = b"" if any(map(key.__contains__, b" \t")) else rb"\s"
        return _encoding_tolerant(key[:length]) + _ANY_CHARACTER % (blank, len(key) - length)
    for byte in reversed(key[length:]):
        rest = b"(?:%b%b)?" % (_byte_pattern(byte), rest)
    return _encoding_tolerant(key[:length]) + rest


def _encoding_tolerant(needle: bytes) -> bytes:
    """Returns a pattern for bytes of which each may be plain, percent-encoded or JSON-escaped."""
    return b"".join(_byte_pattern(byte) for byte in needle)


def _byte_pattern(byte: int) -> bytes:
    """Returns a pattern for one byte, plain, percent-encoded or JSON-escaped."""
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
_NOT_SECRET_NAME = re.compile(
    r"(^|[-_.])(api_key_env|eos_token|pad_token|bos_token)$|_(HOST|host)$"
)


@functools.lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Returns whether a variable, option or JSON key with this name usually has a secret value."""
    return _SECRET_NAME.search(name) is not None and not _NOT_SECRET_NAME.search(name)
