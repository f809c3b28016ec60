import random
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.secrecy.patterns import (
    PERSONAL_DATA,
    SECRETS,
    is_iban,
    kinds_in,
    passes_luhn,
)

_CHANCE = random.Random(7)


def chars(count: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    return "".join(_CHANCE.choices(alphabet, k=count))


# Made here, so that no scanner takes this file for a leak.
PLANTED = [
    ("OpenAI key", "sk-" + chars(48)),
    ("OpenAI key", "sk-proj-" + chars(60)),
    ("Anthropic key", "sk-ant-api03-" + chars(80)),
    ("OpenRouter key", "sk-or-v1-" + chars(64, "0123456789abcdef")),
    ("AWS key", "AKIA" + chars(16, string.ascii_uppercase + string.digits)),
    ("Google key", "AIza" + chars(35)),
    ("Google OAuth token", "ya29." + chars(60)),
    ("GitHub token", "ghp_" + chars(36)),
    ("GitHub token", "github_pat_" + chars(70)),
    ("GitLab token", "glpat-" + chars(20)),
    ("Hugging Face token", "hf_" + chars(34, string.ascii_letters)),
    ("Slack token", "xoxb-" + chars(40, string.digits)),
    ("Slack webhook", "https://hooks.slack.com/services/T01/B02/" + chars(24)),
    ("Stripe key", "sk_live_" + chars(24)),
    ("SendGrid key", "SG." + chars(22) + "." + chars(43)),
    ("npm token", "npm_" + chars(36)),
    ("PyPI token", "pypi-AgE" + chars(80)),
    ("Groq key", "gsk_" + chars(52)),
    ("xAI key", "xai-" + chars(80)),
    ("DigitalOcean token", "dop_v1_" + chars(64, "0123456789abcdef")),
    ("Azure storage key", "AccountKey=" + chars(86) + "=="),
    ("JWT", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0." + chars(43)),
    ("private key", "-----BEGIN " + "RSA PRIVATE KEY-----\nMIIE"),
    ("private key", "-----BEGIN " + "PRIVATE KEY-----"),
    ("private key", "-----BEGIN " + "OPENSSH PRIVATE KEY-----"),
    ("password in a URL", "postgres://bob:" + "hunter22@db.internal/x"),
]


@pytest.mark.parametrize(("kind", "secret"), PLANTED)
@pytest.mark.parametrize(
    "around", ["{}", "the key is {}, ok?", 'key="{}"', "KEY={}\nnext", "look_{}"]
)
def test_a_planted_secret_is_found_and_named(kind: str, secret: str, around: str) -> None:
    assert kinds_in(around.format(secret), SECRETS) == [kind]


@pytest.mark.parametrize(
    "text",
    [
        "set sk-your-openai-api-key-here first",
        "sk-xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
        "the task-" + chars(40),
        "ghp_short",
        "-----BEGIN PUBLIC KEY-----",
        "https://example.org/a:b/c@d",
        "eyJ is how a token begins",
        chars(4000),
    ],
)
def test_what_only_looks_like_a_secret_is_none(text: str) -> None:
    assert kinds_in(text, SECRETS) == []


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("mail bob.smith@gmail.com now", ["email address"]),
        ("mail <bob@mail.co.uk>.", ["email address"]),
        ("someone@example.com", []),
        ("someone@mail.example.org", []),
        ("user@localhost", []),
        ("call +49 170 1234567", ["phone number"]),
        ("call +1 (415) 553-2671", ["phone number"]),
        ("call (415) 553-2671 or", ["phone number"]),
        ("415-553-2671", ["phone number"]),
        ("202-555-0143", []),
        ("or 083/241266.", ["phone number"]),
        ("0341 / 55 66 77", ["phone number"]),
        ("+49 (0)83 241266", ["phone number"]),
        ("at (0341) 556677.", ["phone number"]),
        ("(020) 7946 0958", ["phone number"]),
        ("My number is 0341-5566778", ["phone number"]),
        ("or call me at 0341 556 677 8", ["phone number"]),
        ("+49 83 / 24 12 66", ["phone number"]),
        ("0049 151 2917687", ["phone number"]),
        ("Phone: 0341 / 55 66 77", ["phone number"]),
        ("Tel.: 241266", ["phone number"]),
        ("Tel 0341-556677", ["phone number"]),
        ("Tél. 01.42.68.53.00", ["phone number"]),
        ("mob. (0151) 2917687", ["phone number"]),
        ("Phone no. 555-0143 or Tel. 12.05.2025", []),
        ("A-12345, INV-2025-00417, T-4715 and 034/2025", []),
        ("01/12/2025 08/2025, 2025/012345, 1/083/241266, 0.083/241266", []),
        ("f(0341) 556677, (034) 2025, (0341) 556677.80, [(0123) 45]", []),
        ("my order number is 03415566778, call me at 09:30 on 01.12.2025", []),
        ("My number is 12345678, reach us on 01/12/2025", []),
        ("call us at 08.00-17.00 or 09 00 - 17 30, call me on 01.12.2026 14:30", []),
        ("costs 1,299.00, 0123.45 / 678901 or 083/2412.66", []),
        ("the phone 1299.00, Phone: 1299.00, my iPhone: 12345678", []),
        ("tracking 00340434161094042557, 0034 and 12345678901234", []),
        ("the telephone and 12345678 hotels: 12345678", []),
        ("2026-11-20 12:30:15", []),
        ("1 + 2 = 3 and +5", []),
        ("4111 1111 1111 1111 12/27 123", ["card number"]),
        ("card 378282246310005.", ["card number"]),
        ("5500-0055-5555-5559", ["card number"]),
        ("id 4111111111111112", []),
        ("3.1415926535897932384626", []),
        ("NCT01234567 and 12345678901234567", []),
        ("to DE89 3704 0044 0532 0130 00 today", ["IBAN"]),
        ("GB82WEST12345698765432.", ["IBAN"]),
        ("DE00 3704 0044 0532 0130 00", []),
        ("078-05-1120", ["US social security number"]),
        ("000-05-1120", []),
        ("a@b.io, 4242424242424242", ["email address", "card number"]),
    ],
)
def test_personal_data_is_told_by_form_and_check_digits(text: str, kinds: list[str]) -> None:
    assert kinds_in(text, PERSONAL_DATA) == kinds


@given(st.integers(10**14, 10**15 - 1))
def test_exactly_one_check_digit_passes(number: int) -> None:
    assert sum(passes_luhn(f"{number}{digit}") for digit in range(10)) == 1


@given(st.integers(0, 10**18 - 1), st.integers(0, 17), st.integers(1, 9))
def test_one_wrong_digit_makes_no_iban(account: int, place: int, change: int) -> None:
    body = f"{account:018d}"
    check = 98 - int(f"{body}131400") % 97
    iban = f"DE{check:02d}{body}"
    wrong = str((int(body[place]) + change) % 10)

    assert is_iban(iban)
    assert not is_iban(f"DE{check:02d}{body[:place]}{wrong}{body[place + 1 :]}")
