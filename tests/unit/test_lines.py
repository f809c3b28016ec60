import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.lines import (
    BOM,
    Tail,
    count_lines,
    last_line,
    read_line_blocks,
    read_lines,
    read_tail,
)

BLOCK = 1 << 20
SIZES = st.sampled_from([0, 1, 7, 70_000, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1, 5 * BLOCK])


@given(
    st.lists(st.binary(max_size=12).map(lambda raw: raw.replace(b"\n", b"")), max_size=6),
    st.sampled_from([b"\n", b"\r\n"]),
    st.booleans(),
    st.booleans(),
)
def test_every_line_is_found_where_it_says_it_is(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[bytes],
    newline: bytes,
    has_bom: bool,
    is_ended: bool,
) -> None:
    path = tmp_path_factory.mktemp("lines") / "rows.jsonl"
    content = (BOM if has_bom else b"") + newline.join(lines)
    path.write_bytes(content + (newline if is_ended else b""))

    found = list(read_lines(path))

    assert all(content[at.offset : at.offset + len(at.data)] == at.data for at in found)
    wanted = path.read_bytes().removeprefix(BOM).split(b"\n")
    stripped = [(n, raw.strip(b"\r\n \t")) for n, raw in enumerate(wanted, start=1)]
    assert [(at.number, at.data) for at in found] == [(n, raw) for n, raw in stripped if raw]


@pytest.mark.thorough
@settings(max_examples=30)
@given(
    st.lists(SIZES, max_size=5),
    st.booleans(),
    st.sampled_from([1, 50_000, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK]),
)
def test_lines_over_many_blocks_are_whole_or_cut_where_they_are_too_long(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], is_ended: bool, limit: int
) -> None:
    path = tmp_path_factory.mktemp("lines") / "rows.jsonl"
    letters = [bytes([ord("a") + index]) for index in range(len(sizes))]
    lines = [letter * size for letter, size in zip(letters, sizes, strict=True)]
    path.write_bytes(b"\n".join(lines) + (b"\n" if is_ended else b""))

    found = list(read_lines(path, max_bytes=limit))

    assert list(read_lines(path)) == list(read_lines(path, max_bytes=10 * BLOCK))
    offsets = [sum(sizes[:index]) + index for index in range(len(sizes))]
    # The newline counts, where there is one.
    is_cut = [
        len(line) + (is_ended or index + 1 < len(lines)) > limit for index, line in enumerate(lines)
    ]
    wanted = [
        (index + 1, offsets[index], line[: min(limit, 200)] if is_cut[index] else line)
        for index, line in enumerate(lines)
        if line
    ]
    assert [(at.number, at.offset, at.data) for at in found] == wanted
    assert [at.is_cut for at in found] == [
        cut for cut, line in zip(is_cut, lines, strict=True) if line
    ]
    assert all(at.num_bytes == len(at.data) for at in found)


def test_of_a_line_without_end_only_the_beginning_is_held(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as stream:
        stream.write(b"{" * (4 * BLOCK))
        stream.truncate(64 * BLOCK)

    tracemalloc.start()
    [line] = read_lines(path, max_bytes=BLOCK)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert line.is_cut
    assert line.data == b"{" * 200
    assert peak < 8 * BLOCK


def test_a_line_knows_what_it_is_a_part_of(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"one\ntwo\n" + b"x" * BLOCK + "\nü\n".encode() + b"end")

    one, two, long, _, end = read_lines(path)

    assert one.source is two.source
    assert (one.view, one.data) == (b"one", b"one")
    assert (long.source, end.source) == (b"x" * BLOCK, b"end")


def test_what_is_written_behind_the_last_line_meanwhile_is_no_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"one\ntw")
    blocks = read_line_blocks(path)

    first, last = next(blocks), next(blocks)
    with path.open("ab") as stream:
        stream.write(b"o\nthree\n")

    assert [line.data for line in (*first, *last)] == [b"one", b"tw"]
    assert list(blocks) == []


def test_the_end_of_a_file_is_read_without_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("".join(f"line {number}\n" for number in range(100_000)))
    tail = read_tail(path, 3)
    assert tail.lines == ["line 99997", "line 99998", "line 99999"]
    assert tail.num_bytes == path.stat().st_size
    assert not tail.is_whole
    path.write_text("one\n\nthree")
    assert read_tail(path, 5) == Tail(["one", "", "three"], 10, is_whole=True)
    path.write_text("")
    assert read_tail(path, 5) == Tail([], 0, is_whole=True)
    path.write_text("10 %\r20 %\r30 %\nend\n")
    assert read_tail(path, 5).lines == ["30 %", "end"]


def test_a_line_of_megabytes_is_cut_and_says_how_long_it_is(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(b"first\n" + b"x" * 5_000_000 + b"the end\nlast\n")
    first, cut, last = read_tail(path, 5).lines
    assert (first, last) == ("first", "last")
    assert len(cut) < 2100
    assert "this line has 5,000,007 bytes" in cut
    assert cut.endswith("the end")
    assert last_line(path) == "last"


def test_the_end_of_a_file_has_a_bound_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(("y" * 1500 + "\n") * 400)
    tail = read_tail(path, 500, max_bytes=10_000)
    assert len(tail.lines) == 6
    assert not tail.is_whole


@given(st.lists(st.sampled_from([b"a", b"\n", b"\r\n", b" ", b"\t", b"\xef\xbb\xbf"]), max_size=30))
def test_lines_are_counted_as_they_are_read(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("lines") / "file"
    path.write_bytes(b"".join(parts))

    assert count_lines(path) == len(list(read_lines(path)))


def test_lines_over_many_blocks_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\n".join([b"x" * 700_000, b"", b" ", b"y" * 5, b"z" * 300_000] * 3))

    assert count_lines(path) == 9
