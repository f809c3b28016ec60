"""Keys are found in text in every form that programs give them, and nothing else is changed."""

import base64
import json
import random
import tracemalloc
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.secrecy.redaction import NO_SECRETS, RedactedStream, Redactor

KEY = "sk-canary/5f+2d81c0=="
keys = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=8, max_size=60)
around = st.text(max_size=30)


@pytest.mark.thorough
@settings(max_examples=100)
@given(key=keys, before=around, after=around)
def test_a_key_is_taken_out_in_each_encoding(key: str, before: str, after: str):
    redactor = Redactor([key])
    inside = f"{before}{key}{after}".encode()
    forms = [
        inside.decode(),
        quote(inside.decode(), safe=""),
        "".join(f"%{byte:02x}" for byte in inside),
        quote(quote(inside.decode(), safe=""), safe=""),
        base64.b64encode(inside).decode(),
        base64.urlsafe_b64encode(inside).decode(),
        quote(base64.b64encode(inside).decode(), safe=""),
        json.dumps(base64.b64encode(inside).decode()).replace("/", r"\/"),
    ]
    rest = f"{before}{after}"
    assert redactor.redact_text(rest) == rest or key in rest
    for text in forms:
        clean = redactor.redact_text(text)
        assert key not in clean
        for skipped in range(3):
            whole = key.encode()[skipped : skipped + (len(key) - skipped) // 3 * 3]
            assert base64.b64encode(whole).decode() not in clean
            assert base64.urlsafe_b64encode(whole).decode() not in clean
        assert quote(key, safe="") not in clean


def test_a_json_text_with_escapes_stays_json():
    text = json.dumps({"a": f"x {KEY} y", "b": KEY}).replace("/", r"\/").replace("s", "\\u0073")
    assert json.loads(Redactor([KEY]).redact_text(text)) == {"a": "x [key] y", "b": "[key]"}


@pytest.mark.parametrize("key", ["EMPTY", "x", "none", "", None])
def test_a_word_that_stands_for_no_key_is_left_in_texts(key: str | None):
    assert (
        Redactor([key]).redact_text(f"an EMPTY box, none of {key}")
        == f"an EMPTY box, none of {key}"
    )
    assert NO_SECRETS.redact_bytes(b"x") == b"x"


def test_the_longer_of_two_keys_is_taken_out_whole():
    redactor = Redactor(["sk-canary-1", "sk-canary-1-and-more"])
    assert redactor.redact_value({"a": ["sk-canary-1-and-more", 1, None]}) == {
        "a": ["[key]", 1, None]
    }


@pytest.mark.parametrize("size", [61, 1000, 16_411])
def test_a_key_that_is_printed_in_pieces_is_taken_out(size: int):
    encoded = base64.b64encode(KEY.encode()).decode()
    text = f"a\n{KEY}\nlong {'x' * 40_000} {KEY} {encoded} and {KEY}, the end".encode()
    written: list[bytes] = []
    stream = RedactedStream(Redactor([KEY]), written.append)
    for start in range(0, len(text), size):
        stream.write(text[start : start + size])
    stream.flush()
    clean = b"".join(written).decode()
    assert clean.count("[key]") == 4
    assert KEY[:8] not in clean
    assert clean.startswith("a\n[key]\nlong xxx")
    assert clean.endswith(", the end")


@settings(max_examples=60)
@given(key=keys, before=around, after=around, form=st.integers(0, 3))
def test_a_key_within_a_longer_one_is_found_alone_and_in_it(key, before, after, form):
    longer = f"Bearer {key} and more"
    both = Redactor([longer, key])
    for one in (key, longer):
        spelled = [one, quote(one, safe=""), base64.b64encode(one.encode()).decode(),
                   "".join(f"\\u{byte:04x}" for byte in one.encode())][form]  # fmt: skip
        text = f"{before} {spelled} {after}".encode()
        assert both.contains_secret(text)
        assert len(spelled) <= both.reach
    plain = f"{before}{after}".encode()
    assert both.contains_secret(plain) == (
        Redactor([key]).contains_secret(plain) or Redactor([longer]).contains_secret(plain)
    )


@pytest.mark.thorough
def test_a_key_of_any_length_is_taken_out_whole_in_little_memory():
    key = random.Random(1).randbytes(60_000).hex()
    forms = (key, quote(f"{key}/+"), base64.b64encode(f"a{key}".encode()).decode())
    tracemalloc.start()
    redactor = Redactor([key, f"{key}/+"])
    texts = [redactor.redact_text(f"it is {form} and more") for form in forms]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert texts == ["it is [key] and more"] * len(forms)
    assert most < 32 << 20
