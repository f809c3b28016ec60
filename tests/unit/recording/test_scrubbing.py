"""The record of a stream, made while it goes on, is the one made of it when it is whole."""

import base64
import json
from itertools import cycle

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.recording.scrubbing import KeySearch, StreamText, scrub
from stillroom.secrecy.redaction import Redactor

KEYS = ("Bearer sk-canary/5f+2d81c0", "sk-canary/5f+2d81c0")
KEY = KEYS[1]
SPELLINGS = (
    KEY,
    json.dumps(KEY).replace("/", r"\/"),
    "".join(f"%{byte:02X}" for byte in KEY.encode()),
    "".join(f"\\u{byte:04x}" for byte in KEY.encode()),
    base64.b64encode(f"a:{KEY}".encode()).decode(),
)
texts = st.lists(st.sampled_from([*SPELLINGS, *KEY, "plain ", "\n", "é", '"', "\\"]), max_size=8)


def _event(field: str, piece: str) -> bytes:
    return f"data: {json.dumps({'delta': {field: piece}}, ensure_ascii=False)}\n\n".encode()


def _read_in_blocks(data: bytes, cuts: list[int], redactor: Redactor) -> StreamText:
    stream, places = StreamText(redactor), sorted(cut % (len(data) + 1) for cut in cuts)
    for start, end in zip([0, *places], [*places, len(data)], strict=True):
        stream.add(data[start:end])
        stream.process_pending()
    return stream


@settings(max_examples=60)
@given(
    said=texts,
    others=texts,
    filler=st.sampled_from([0, 40, 300]),
    size=st.integers(1, 9),
    cuts=st.lists(st.integers(0, 1 << 16), max_size=12),
    end=st.sampled_from([b"", b"data: [DONE]\n\n", b"torn", b"\xff\n"]),
)
def test_a_stream_read_in_any_blocks_is_scrubbed_as_the_whole(
    said, others, filler, size, cuts, end
):
    """Keys lie in an event, or in pieces of texts between which other events come."""
    text = "".join(said)
    events = [_event("content", text[i : i + size]) for i in range(0, len(text), size)]
    fields = cycle(("unlisted", "thinking"))
    events += [_event(field, piece) for field, piece in zip(fields, others, strict=False)]
    events += [_event("content", "so")] * filler
    data, redactor = b"".join(events) + end, Redactor(KEYS)

    stream = _read_in_blocks(data, cuts, redactor)
    encoded = stream.finish()
    at_once = StreamText(redactor)
    at_once.add(data)
    assert encoded == at_once.finish()
    clean = scrub(data, redactor, at_once)
    assert scrub(data, redactor, stream) == clean
    # It is ready ahead exactly if it can stay as it is.
    is_text = b"\xff" not in data
    assert (encoded is not None) == (clean is data and is_text)
    if encoded is not None:
        assert encoded == msgspec.json.encode(data.decode())
    whole = b"".join(json.loads(line[6:])["delta"].get("content", "").encode() for line in
                     clean.split(b"\n") if line.startswith(b"data: {"))  # fmt: skip
    assert KEY.encode() not in clean + whole


@pytest.mark.parametrize("spelled", SPELLINGS)
def test_a_key_is_found_wherever_the_parts_of_a_text_are_cut(spelled):
    redactor = Redactor(KEYS)
    for before in range(redactor.reach - len(spelled) - 40, redactor.reach + 40, 7):
        search = KeySearch(redactor)
        text = b"." * before + spelled.encode() + b"." * 100
        for start in range(0, len(text), 33):
            search.add(text[start : start + 33])
        assert search.has_key


class CountingRedactor(Redactor):
    num_read = 0

    def contains_secret(self, data: bytes) -> bool:
        self.num_read += len(data)
        return super().contains_secret(data)


def test_little_is_left_to_read_at_the_end_of_a_long_stream():
    redactor = CountingRedactor(KEYS)
    stream = StreamText(redactor)
    for number in range(5000):
        stream.add(_event("content", f" word {number}"))
        stream.process_pending()
    redactor.num_read = 0
    encoded = stream.finish()
    assert encoded is not None
    assert len(encoded) > 200_000
    assert redactor.num_read < 4 * redactor.reach + 1024


def test_a_line_without_an_end_is_put_together_once():
    stream = StreamText(Redactor(KEYS))
    blocks = [b"x" * 1000] * 2000
    for block in blocks:
        stream.add(block)
        stream.process_pending()
    assert stream._pending == blocks
    assert stream.finish() == b'"%b"' % b"".join(blocks)
