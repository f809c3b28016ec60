"""Detects kinds of secrets and personal data in texts, and replaces them on request.

A kind is recognised by a fixed keyword (a key's prefix, a header) or by a checksum, never by its
shape alone: a filter that drops good rows over a random number is soon turned off.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

_Check = Callable[[str], bool]
_EndOf = Callable[[str, re.Match[str]], int]


@dataclass(frozen=True, slots=True)
class SensitiveKind:
    """One kind of secret or personal data, and how to recognise it."""

    name: str
    keywords: tuple[str, ...]
    """The pattern is searched for only in texts with one of these; if empty, in every text."""
    pattern: re.Pattern[str]
    """Its group `data` matches the data, if only a part of the match is data."""
    is_real: _Check
    """Returns whether a match of the pattern is real data, not a placeholder or a random number."""
    end_of: _EndOf
    """Returns where the data ends in the text; the pattern may match less or more than the data."""
    min_digits: int = 0
    """The pattern is searched for only in texts with at least this many digits."""


def _match_end(_text: str, match: re.Match[str]) -> int:
    return match.end()


def _kind(
    name: str,
    keywords: str,
    pattern: str,
    is_real: _Check = bool,
    end_of: _EndOf = _match_end,
    min_digits: int = 0,
) -> SensitiveKind:
    """Returns a SensitiveKind; `keywords` are separated by spaces."""
    return SensitiveKind(
        name, tuple(keywords.split()), re.compile(pattern), is_real, end_of, min_digits
    )


_KEY_BEGIN = r"-----BEGIN (?:[A-Z]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----"
_KEY_END = re.compile(r"-----END (?:[A-Z]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----")
_KEY_LINES = re.compile(r"[A-Za-z0-9+/=\s]*")
_LONGEST_KEY = 1 << 15


def _key_end(text: str, match: re.Match[str]) -> int:
    """Returns where a private key ends; without a footer, where its base64 lines end."""
    footer = _KEY_END.search(text, match.end(), match.end() + _LONGEST_KEY)
    lines = footer or _KEY_LINES.match(text, match.end())
    return lines.end() if lines else match.end()


def _looks_random(key: str) -> bool:
    """Returns whether a key looks random, unlike placeholders such as `sk-your-key-goes-here`."""
    body = key[-20:]
    return len(set(body)) >= 8 and not (body.islower() and not any(map(str.isdigit, body)))


# An underscore may precede a key: names of tools and variables are joined with it.
_START, _END = r"(?<![A-Za-z0-9-])", r"(?![A-Za-z0-9_-])"

SECRETS = (
    _kind("private key", "-----BEGIN", _KEY_BEGIN, end_of=_key_end),
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
    """Returns whether the last digit is the Luhn check digit of the others."""
    digits = [int(char) for char in reversed(number) if char.isdigit()]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[1::2]]
    return (sum(digits[::2]) + sum(doubled)) % 10 == 0


_CARD = re.compile(
    r"4\d{12}(?:\d{3}(?:\d{3})?)?|5[1-5]\d{14}|2(?:22[1-9]|2[3-9]\d|[3-6]\d\d|7[01]\d|720)\d{12}"
    r"|3[47]\d{13}|3(?:0[0-5]|[68]\d)\d{11}|6(?:011|5\d\d|4[4-9]\d)\d{12}|35(?:2[89]|[3-8]\d)\d{12}"
    r"|62\d{14,17}"
)


def is_card_number(number: str) -> bool:
    """Returns whether a number has a card brand's length and prefix, and a valid check digit."""
    digits = re.sub(r"\D", "", number)
    return _CARD.fullmatch(digits) is not None and passes_luhn(digits)


def _card_length(text: str) -> int:
    """Returns the length of the card number at the beginning of a text, or 0.

    The card number may be followed by an expiry date.
    """
    ends = [*(match.start() for match in re.finditer(r"[ -]", text)), len(text)]
    return max((end for end in ends if is_card_number(text[:end])), default=0)


def _has_card(text: str) -> bool:
    return _card_length(text) > 0


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
    """Returns whether a text is an IBAN with its country's length and valid check digits."""
    plain = re.sub(r"\s", "", text)
    if len(plain) != _IBAN_LENGTHS.get(plain[:2]):
        return False
    return int("".join(str(int(char, 36)) for char in plain[4:] + plain[:4])) % 97 == 1


def _has_iban(text: str) -> bool:
    """Returns whether the text begins with an IBAN, which other words may follow."""
    return is_iban(text[: _iban_length(text)])


def _iban_length(text: str) -> int:
    """Returns the length, spaces included, of an IBAN of the country in the first two letters."""
    ends = [match.end() for match in re.finditer(r"\S", text)]
    length = _IBAN_LENGTHS.get(text[:2], 0)
    return ends[length - 1] if 0 < length <= len(ends) else 0


_RESERVED_DOMAIN = re.compile(
    r"(?:.*\.)?(?:example(?:\.\w+)?|test|invalid|localhost|local)", re.IGNORECASE
)


def _is_real_address(address: str) -> bool:
    """Returns whether an email address may be real: its domain is not reserved for examples."""
    return _RESERVED_DOMAIN.fullmatch(address.rpartition("@")[2]) is None


def _is_phone(number: str, min_digits: int = 8) -> bool:
    """Returns whether a number has a phone number's length and is not an obvious placeholder."""
    digits = re.sub(r"\D", "", number)
    # 555-01xx is reserved for fiction, and one or two repeated digits are a placeholder.
    return min_digits <= len(digits) <= 15 and len(set(digits)) > 2 and "55501" not in digits


_DATE_OR_AMOUNT = re.compile(
    r"\d{1,2}[./-]\d{1,2}[./-]\d{2,4}|\d{4}[./-]\d{1,2}[./-]\d{1,2}|\d+\.\d\d"
    r"|\d{1,2}[./-]\d{1,2}[./-]20\d\d[ -].*|[0-2]\d[. ][0-5]\d ?- ?[0-2]\d[. ][0-5]\d"
)


def _is_labelled_phone(number: str) -> bool:
    """Returns whether the number after a label such as `Tel.` is a phone number."""
    return _DATE_OR_AMOUNT.fullmatch(number) is None and _is_phone(number, 6)


_ADDRESS = r"(?<![\w.+-])[A-Za-z0-9][\w.+-]{0,63}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}\b"


def has_reserved_address(text: str) -> bool:
    """Returns whether a text has an email address in a domain reserved for examples."""
    return not all(_is_real_address(found[0]) for found in re.finditer(_ADDRESS, text))


PERSONAL_DATA = (
    _kind("email address", "@", _ADDRESS, _is_real_address),
    _kind(
        "phone number",
        "+",
        r"(?<![\w+])\+[1-9]\d{0,2}(?:(?:[ .()-]{0,2}| ?/ ?)\d){7,12}(?!\w)",
        _is_phone,
        min_digits=8,
    ),
    _kind(
        "phone number",
        "00",
        r"00[1-9](?<![\w.,:/+-]...)(?<!\d ...)\d{0,2}[ /(](?:(?:[ .()-]{0,2}| ?/ ?)\d){7,12}(?!\w)",
        _is_phone,
        min_digits=10,
    ),
    _kind(
        "phone number",
        "/",
        r"0(?<![\w.,:/+-].)[1-9]\d{1,4}\)? ?/ ?\d(?: ?\d){4,8}(?![\w/-]|[.,]\d)",
        _is_phone,
        min_digits=8,
    ),
    _kind(
        "phone number",
        "(0",
        r"(?<![\w.,:/+-])\(0[1-9]\d{1,4}\) ?\d(?:[ -]?\d){4,8}(?![\w/-]|[.,]\d)",
        _is_phone,
        min_digits=8,
    ),
    _kind(
        "phone number",
        "umber me us",
        r"(?i:\b(?:(?:my|our) number(?: is)?|(?:call|ring|reach|text) (?:me|us) (?:at|on))\b)"
        r"(?::[ \t]{0,3}|[ \t]{1,3})(?=[0+(])(?P<data>[+(]{0,2}\d(?:[ .()/-]{0,3}\d){7,13})(?!\w)",
        _is_labelled_phone,
        min_digits=8,
    ),
    _kind(
        "phone number",
        "Tel tel TEL Tél hone HONE Mob mob MOB Fax fax FAX Handy Fon",
        r"(?i:\b(?:tele(?:f|ph)on[eo]?|phone|tel|tél|mob(?:ile?)?|fax|handy|fon)\b)"
        r"(?: ?(?i:number|nummer|no|nr)\b)?(?:[.:]{1,2}[ \t]{0,3}|[ \t]{1,3}(?=[0+(]))"
        r"(?P<data>[+(]{0,2}\d(?:[ .()/-]{0,3}\d){5,13})(?!\w)",
        _is_labelled_phone,
        min_digits=6,
    ),
    _kind(
        "phone number",
        "- . )",
        r"(?<![\w.+-])(?:\([2-9]\d\d\) ?|[2-9]\d\d[-.])[2-9]\d\d[-.]\d{4}(?![\w-]|\.\d)",
        _is_phone,
        min_digits=10,
    ),
    _kind("card number", "", r"[2-6](?<![\w.-].)(?:[ -]?\d){12,18}(?![\w-]|\.\d)", _has_card,
        lambda _text, match: match.start() + _card_length(match[0]), 12),
    _kind("IBAN", "", r"[A-Z](?<![A-Za-z0-9].)[A-Z]\d{2}(?: ?[A-Z0-9]){11,30}", _has_iban,
        lambda _text, match: match.start() + _iban_length(match[0]), 6),
    _kind(
        "US social security number",
        "-",
        r"(?<![\w-])(?!000|666|9)\d{3}-(?!00)\d\d-(?!0000)\d{4}(?![\w-])",
        min_digits=9,
    ),
)  # fmt: skip


def kinds_in(text: str, kinds: tuple[SensitiveKind, ...]) -> list[str]:
    """Returns the names of the kinds found in a text, each once, in the order of `kinds`."""
    scanned = _blank_escapes(text)
    candidates = _candidate_kinds(scanned, kinds)
    names = (kind.name for kind in candidates if next(_find_spans(scanned, kind), None) is not None)
    return list(dict.fromkeys(names))


def replace_kinds(
    text: str, kinds: tuple[SensitiveKind, ...], replacement: Callable[[str, str], str]
) -> str:
    """Returns a text with all data of these kinds replaced.

    `replacement` is called with the kind's name and the data to replace.
    """
    scanned = _blank_escapes(text)
    candidates = _candidate_kinds(scanned, kinds)
    if not candidates:
        return text
    spans = sorted((*span, kind.name) for kind in candidates for span in _find_spans(scanned, kind))
    parts, done = list[str](), 0
    for start, end, name in spans:
        if start >= done:
            parts += (text[done:start], replacement(name, text[start:end]))
            done = end
    return "".join((*parts, text[done:]))


_ESCAPES = re.compile(r"\\[nrt\"]")
_NO_DIGITS = bytes(code for code in range(128) if not chr(code).isdecimal())
_DIGIT = re.compile(r"\d")


def _blank_escapes(text: str) -> str:
    """Replaces JSON's escapes of whitespace and quotes with spaces; the length stays the same.

    In a text that contains JSON, the `n` of an escape `\\n` would look like part of a word.
    """
    return _ESCAPES.sub("  ", text) if "\\" in text else text


def _candidate_kinds(text: str, kinds: tuple[SensitiveKind, ...]) -> Sequence[SensitiveKind]:
    """Returns the kinds that a text may contain, by its keywords and digits; mostly none."""
    index = _KEYWORD_INDEXES.get(id(kinds))
    if index is None or index.kinds is not kinds:
        index = _KEYWORD_INDEXES[id(kinds)] = _KeywordIndex(kinds)
    matched = {
        number
        for prefilter, keywords in index.prefilters
        if prefilter in text
        for keyword, number in keywords
        if keyword in text
    }
    if not matched and not index.without_keywords:
        return ()
    num_digits = _num_digits(text)
    if not matched and num_digits < index.min_digits:
        return ()
    numbers = sorted(matched.union(index.without_keywords))
    return [kinds[number] for number in numbers if kinds[number].min_digits <= num_digits]


class _KeywordIndex:
    """The keywords of kinds, grouped by a character, so that a few searches rule out most texts.

    `prefilters` lists for each character the keywords that contain it, with their kind's index.
    """

    def __init__(self, kinds: tuple[SensitiveKind, ...]) -> None:
        self.kinds = kinds
        self.without_keywords = [number for number, kind in enumerate(kinds) if not kind.keywords]
        self.min_digits = min(
            (kinds[number].min_digits for number in self.without_keywords), default=0
        )
        prefilters = defaultdict[str, list[tuple[str, int]]](list)
        for number, kind in enumerate(kinds):
            for keyword in kind.keywords:
                prefilter = next((char for char in _PREFILTER_CHARS if char in keyword), keyword)
                prefilters[prefilter].append((keyword, number))
        self.prefilters = tuple(prefilters.items())


_PREFILTER_CHARS = "-_JGAx/."
"""Characters that are in many keywords and missing from many texts."""
_KEYWORD_INDEXES: dict[int, _KeywordIndex] = {}


def _num_digits(text: str) -> int:
    if text.isascii():
        return len(text.encode().translate(None, _NO_DIGITS))
    return len(_DIGIT.findall(text))


def _find_spans(text: str, kind: SensitiveKind) -> Iterator[tuple[int, int]]:
    """Yields the start and end of each occurrence of a kind in a text."""
    for match in kind.pattern.finditer(text):
        group = "data" if "data" in kind.pattern.groupindex else 0
        if kind.is_real(match[group]):
            yield match.start(group), kind.end_of(text, match)
