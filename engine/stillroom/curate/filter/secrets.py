"""Finds which kinds of secrets and personal data a text holds, without returning the data itself.

A kind is recognised by a fixed mark (a key's prefix, a header) or by a checksum, not by its looks
alone: people stop using a filter that drops good rows for a random number.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_Check = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class SensitiveKind:
    """One kind of secret or personal data, and how to recognise it."""

    name: str
    marks: tuple[str, ...]
    """The pattern is tried only on texts with one of these; without marks, on every text."""
    pattern: re.Pattern[str]
    is_real: _Check = bool


def _kind(name: str, marks: str, pattern: str, is_real: _Check = bool) -> SensitiveKind:
    return SensitiveKind(name, tuple(marks.split()), re.compile(pattern), is_real)


def _looks_random(key: str) -> bool:
    """Returns whether a key looks random, unlike placeholders such as `sk-your-key-goes-here`."""
    body = key[-20:]
    return len(set(body)) >= 8 and not (body.islower() and not any(map(str.isdigit, body)))


_START, _END = r"(?<![A-Za-z0-9_-])", r"(?![A-Za-z0-9_-])"

SECRETS = (
    _kind("private key", "-----BEGIN", r"-----BEGIN (?:[A-Z]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----"),
    _kind("Anthropic key", "sk-ant-", _START + r"sk-ant-[A-Za-z0-9_-]{20,}", _looks_random),
    _kind("OpenRouter key", "sk-or-", _START + r"sk-or-v1-[0-9a-f]{32,}", _looks_random),
    _kind("OpenAI key", "sk-", _START + r"sk-(?!ant-|or-)[A-Za-z0-9_-]{20,}", _looks_random),
    _kind("AWS key", "AKIA ASIA", _START + r"(?:AKIA|ASIA)[A-Z0-9]{16}" + _END),
    _kind("Google key", "AIza", _START + r"AIza[A-Za-z0-9_-]{35}" + _END),
    _kind("Google OAuth token", "ya29.", _START + r"ya29\.[A-Za-z0-9_-]{30,}"),
    _kind("GitHub token", "ghp_ gho_ ghr_ ghs_ ghu_", _START + r"gh[oprsu]_[A-Za-z0-9]{36,}"),
    _kind("GitHub token", "github_pat_", _START + r"github_pat_[A-Za-z0-9_]{60,}" + _END),
    _kind("GitLab token", "glpat-", _START + r"glpat-[A-Za-z0-9_-]{20,}"),
    _kind("Hugging Face token", "hf_", _START + r"hf_[A-Za-z]{30,}" + _END),
    _kind("Slack token", "xox xapp-", _START + r"(?:xox[abeoprs]-|xapp-)[A-Za-z0-9-]{20,}"),
    _kind("Slack webhook", "hooks.slack.com", r"hooks\.slack\.com/services/T\w+/B\w+/\w{16,}"),
    _kind("Stripe key", "k_", _START + r"[rs]k_(?:live|test)_[A-Za-z0-9]{16,}" + _END),
    _kind("SendGrid key", "SG.", _START + r"SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{30,}"),
    _kind("npm token", "npm_", _START + r"npm_[A-Za-z0-9]{36}" + _END),
    _kind("PyPI token", "pypi-", _START + r"pypi-AgE[A-Za-z0-9_-]{50,}"),
    _kind("Groq key", "gsk_", _START + r"gsk_[A-Za-z0-9]{40,}" + _END),
    _kind("xAI key", "xai-", _START + r"xai-[A-Za-z0-9]{40,}" + _END),
    _kind("DigitalOcean token", "_v1_", _START + r"do[opr]_v1_[a-f0-9]{64}" + _END),
    _kind("Azure storage key", "AccountKey=", r"AccountKey=[A-Za-z0-9+/]{80,}={0,2}"),
    _kind(
        "JWT", "eyJ", _START + r"eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{16,}"
    ),
    _kind("password in a URL", "://", r"[a-z][a-z0-9+]{1,15}://[^\s:/?#@]{1,64}:[^\s:/?#@]{3,128}@"),
)  # fmt: skip


def passes_luhn(number: str) -> bool:
    """Returns whether the last digit is the right Luhn check digit for the others."""
    digits = [int(char) for char in reversed(number) if char.isdigit()]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[1::2]]
    return (sum(digits[::2]) + sum(doubled)) % 10 == 0


_CARD = re.compile(
    r"4\d{12}(?:\d{3}(?:\d{3})?)?|5[1-5]\d{14}|2(?:22[1-9]|2[3-9]\d|[3-6]\d\d|7[01]\d|720)\d{12}"
    r"|3[47]\d{13}|3(?:0[0-5]|[68]\d)\d{11}|6(?:011|5\d\d|4[4-9]\d)\d{12}|35(?:2[89]|[3-8]\d)\d{12}"
    r"|62\d{14,17}"
)


def is_card_number(number: str) -> bool:
    """Returns whether a number has a card brand's length and prefix, and a right check digit."""
    digits = re.sub(r"\D", "", number)
    return _CARD.fullmatch(digits) is not None and passes_luhn(digits)


def _card_at(text: str) -> bool:
    """Returns whether the text begins with a card number; an expiry date may follow it."""
    ends = [match.start() for match in re.finditer(r"[ -]", text)]
    return any(is_card_number(text[:end]) for end in [*ends, len(text)])


_IBAN_LENGTHS = {
    country: int(length)
    for lengths in (
        "AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DK18 DO28",
        "EE20 EG29 ES24 FI18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HR21 HU28 IE22 IL23 IQ23 IS26",
        "IT27 JO30 KW30 KZ20 LB28 LC32 LI21 LT20 LU20 LV21 LY25 MC27 MD24 ME22 MK19 MR27 MT31 MU30",
        "NL18 NO15 PK24 PL28 PS29 PT25 QA29 RO24 RS22 SA24 SC31 SE24 SI19 SK24 SM27 ST25 SV28 TL23",
        "TN24 TR26 UA29 VA22 VG24 XK20",
    )
    for country, length in ((item[:2], item[2:]) for item in lengths.split())
}


def is_iban(text: str) -> bool:
    """Returns whether a text is an IBAN with its country's length and right check digits."""
    plain = re.sub(r"\s", "", text)
    if len(plain) != _IBAN_LENGTHS.get(plain[:2]):
        return False
    return int("".join(str(int(char, 36)) for char in plain[4:] + plain[:4])) % 97 == 1


def _iban_at(text: str) -> bool:
    """Returns whether the text begins with an IBAN; other words may follow it."""
    plain = re.sub(r"\s", "", text)
    return is_iban(plain[: _IBAN_LENGTHS.get(plain[:2], 0)])


_RESERVED = re.compile(
    r"(?:.*\.)?(?:example(?:\.\w+)?|test|invalid|localhost|local)", re.IGNORECASE
)


def _is_mailbox(address: str) -> bool:
    """Returns whether an email address may be real, not in a domain reserved for examples."""
    return _RESERVED.fullmatch(address.rpartition("@")[2]) is None


def _is_phone(number: str) -> bool:
    digits = re.sub(r"\D", "", number)
    # 555-01xx is reserved for fiction, and one or two repeated digits are a placeholder.
    return 8 <= len(digits) <= 15 and len(set(digits)) > 2 and "55501" not in digits


PERSONAL_DATA = (
    _kind(
        "email address",
        "@",
        r"(?<![\w.+-])[A-Za-z0-9][\w.+-]{0,63}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}\b",
        _is_mailbox,
    ),
    _kind(
        "phone number",
        "+",
        r"(?<![\w+])\+[1-9]\d{0,2}(?:[ .()-]{0,2}\d){7,12}(?!\w)",
        _is_phone,
    ),
    _kind(
        "phone number",
        "- . )",
        r"(?<![\w.+-])(?:\([2-9]\d\d\) ?|[2-9]\d\d[-.])[2-9]\d\d[-.]\d{4}(?![\w-]|\.\d)",
        _is_phone,
    ),
    _kind("card number", "", r"[2-6](?<![\w.-].)(?:[ -]?\d){12,18}(?![\w-]|\.\d)", _card_at),
    _kind("IBAN", "", r"[A-Z](?<![A-Za-z0-9].)[A-Z]\d{2}(?: ?[A-Z0-9]){11,30}", _iban_at),
    _kind(
        "US social security number",
        "-",
        r"(?<![\w-])(?!000|666|9)\d{3}-(?!00)\d\d-(?!0000)\d{4}(?![\w-])",
    ),
)  # fmt: skip


def kinds_in(text: str, kinds: tuple[SensitiveKind, ...]) -> list[str]:
    """Returns the names of the kinds found in a text, each once, in the order of `kinds`."""
    names = (kind.name for kind in kinds if _holds(text, kind))
    return list(dict.fromkeys(names))


def _holds(text: str, kind: SensitiveKind) -> bool:
    if kind.marks and not any(mark in text for mark in kind.marks):
        return False
    return any(kind.is_real(match) for match in _matches(text, kind.pattern))


def _matches(text: str, pattern: re.Pattern[str]) -> Iterator[str]:
    return (match[0] for match in pattern.finditer(text))
