"""Each sample of a format is recognised by that format alone."""

import pytest

from fakes.trace_files import LOG_FORMATS, SAMPLES, recognised_by, sample_files
from stillroom.importing.json_rows import head_rows

_HOSTILE = {
    "empty": b"",
    "blank": b" \n\n",
    "text": b"Hello,\nworld\n",
    "binary": bytes(range(256)) * 8,
    "list of numbers": b"[1, 2, 3]",
    "list of lists": b'[[{"messages": []}]]',
    "other rows": b'{"a": 1}\n{"b": [1, {"c": 2}]}\n',
    "wrong kinds": b'{"messages": 5, "conversations": {"from": 1}, "instruction": [], "prompt": 1}',
    "deep": b"[" * 40_000,
    "deep objects": b'{"messages":' * 5_000,
    "bad UTF-8": b'{"messages": [{"role": "us\xff"}]}',
    "half a character": b'{"prompt": "\\ud800", "completion": "\\udfff"}',
}


@pytest.mark.parametrize("path", sample_files(), ids=lambda p: str(p.relative_to(SAMPLES)))
def test_a_sample_is_recognised_by_its_own_format_alone(path):
    own = path.relative_to(SAMPLES).parts[0]
    names = recognised_by(path)
    assert names[0] == own
    # Tables of other systems are tables too, and these formats come after theirs.
    assert [name for name in names if name == own or name not in ("csv", "parquet")] == [own]


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".txt", ".eval", ".traj"])
@pytest.mark.parametrize("data", _HOSTILE.values(), ids=_HOSTILE.keys())
def test_a_file_that_is_none_of_them_is_recognised_by_none(data, suffix, tmp_path):
    path = tmp_path / f"file{suffix}"
    path.write_bytes(data)
    assert recognised_by(path) == []


@pytest.mark.parametrize(
    ("head", "rows"),
    [
        (b'{"a": 1}\n{"b": 2}\n{"c": "cut', [{"a": 1}, {"b": 2}]),
        (b'{"a": {"b": [1, 2, {"c": "long te', [{"a": {"b": [1, 2, {}]}}]),
        (b'\xef\xbb\xbf{\n "a": 1,\n "b": [{"c": tr', [{"a": 1, "b": [{}]}]),
        (b'[{"a": "x\\"]},"}, {"b": [1, 2', [{"a": 'x"]},'}, {"b": [1]}]),
        (b'broken\n{"a": 1}\n', [{"a": 1}]),
    ],
)
def test_the_first_rows_are_seen_though_the_rest_of_the_file_is_not(head, rows):
    assert list(head_rows(head)) == rows


_LONG = ("What does the lamp cost", "You help in a shop", "Price of the lamp", "Let me look")


@pytest.mark.parametrize("long_text", _LONG)
def test_a_file_is_recognised_though_its_first_row_is_long(long_text, tmp_path):
    for path in sample_files():
        own = path.relative_to(SAMPLES).parts[0]
        data = path.read_bytes()
        if own in LOG_FORMATS and long_text.encode() in data:
            longer = tmp_path / path.name
            longer.write_bytes(
                data.replace(long_text.encode(), long_text.encode() + b" x" * 50_000)
            )
            assert recognised_by(longer)[0] == own, path


def test_samples_of_logs_tell_nothing_of_the_machine_that_made_them():
    for path in sample_files():
        if path.relative_to(SAMPLES).parts[0] in LOG_FORMATS:
            data = path.read_bytes()
            assert len(data) < 20_000, path
            for mark in (
                b"127.0.0.1",
                b"localhost",
                b"site-packages",
                b"/root/",
                b"/home/",
                b"/tmp/",
            ):
                assert mark not in data, path
