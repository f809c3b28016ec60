"""Any line of a large file is found, wherever blocks end, and in a file that grows."""

import json
from pathlib import Path

import pytest

from fakes.rollout_rows import rollout_row, user
from stillroom.errors import InputError
from stillroom.settings import Workspace
from stillroom_mcp.dashboard import row_files
from stillroom_mcp.dashboard.row_files import RowFiles
from stillroom_mcp.dashboard.rows import rows_page


def lines_read(files: RowFiles, path: Path, first: int, num: int) -> list[tuple[int, bytes]]:
    rows = files.read(path, first, num)
    whole = path.read_bytes()
    assert all(whole[row.offset :].startswith(row.data) for row in rows)
    return [(row.number, row.data) for row in rows]


@pytest.mark.parametrize("block", [1, 3, 7, 16, 1000])
@pytest.mark.parametrize("end", ["", "\n"])
def test_every_line_is_found_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, end: str
) -> None:
    monkeypatch.setattr(row_files, "_BLOCK", block)
    texts = ["a" * (n % 9 + 1) + str(n) for n in range(40)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(texts) + end, encoding="utf-8")
    files = RowFiles(Workspace(tmp_path))
    assert files.count_lines(path) == 40
    for first in range(41):
        expected = [(n + 1, texts[n].encode()) for n in range(first, min(first + 3, 40))]
        assert lines_read(files, path, first, 3) == expected


def test_lines_that_are_added_are_found_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_files, "_BLOCK", 16)
    path = tmp_path / "rows.jsonl"
    files = RowFiles(Workspace(tmp_path))
    path.touch()
    for n in range(30):
        with path.open("a", encoding="utf-8") as stream:
            stream.write(f"row {n}\n")
        assert files.count_lines(path) == n + 1
        assert lines_read(files, path, n, 5) == [(n + 1, f"row {n}".encode())]
    path.write_text("other\n", encoding="utf-8")
    assert lines_read(files, path, 0, 5) == [(1, b"other")]


def test_a_page_is_read_without_the_rows_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    line = b'{"prompt": "' + b"x" * 985 + b'"}\n'
    path.write_bytes(line * 8000)
    files = RowFiles(Workspace(tmp_path))
    assert files.count_lines(path) == 8000
    starts: list[int] = []
    read = row_files._lines_from
    monkeypatch.setattr(row_files, "_lines_from", lambda *at: (starts.append(at[1]), read(*at))[1])
    for first in (0, 4000, 7950):
        assert [row.number for row in files.read(path, first, 50)] == [
            *range(first + 1, first + 51)
        ]
        assert first * len(line) - starts[-1] <= 2 << 20


def test_a_row_is_read_where_a_line_begins_and_nowhere_else(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("first\nsecond\n", encoding="utf-8")
    files = RowFiles(Workspace(tmp_path))
    assert [files.read_at(path, offset) for offset in (0, 6)] == [b"first", b"second"]
    with pytest.raises(InputError, match="no row begins"):
        files.read_at(path, 3)


def test_of_a_huge_row_the_head_is_shown_and_its_neighbours_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_files, "MAX_SHOWN_BYTES", 4096)
    path = tmp_path / "rows.jsonl"
    huge, small = json.dumps({"prompt": "x" * 100_000}), json.dumps({"prompt": "small"})
    path.write_text(f"{small}\n{huge}\n{small}\n", encoding="utf-8")
    files = RowFiles(Workspace(tmp_path))
    read = files.read(path, 0, 5)
    assert [(row.is_cut, len(row.data)) for row in read] == [
        (False, len(small)), (True, 4096), (False, len(small)),
    ]  # fmt: skip
    titles = [row.title for row in rows_page(files, path, 0, show="all", query="").rows]
    assert titles[0] == titles[2] == "small"
    assert '{"prompt": "xxx' in titles[1]
    assert len(titles[1]) < 300
    with pytest.raises(InputError, match=r"and begins: ..prompt.: .xxx"):
        files.read_at(path, len(small) + 1)
    assert files.read_at(path, len(small) + len(huge) + 2) == small.encode()


@pytest.mark.parametrize(
    "name", ["../out.jsonl", "/etc/passwd", "link.jsonl", ".env", "config.yml", "gone.jsonl", "."]
)
def test_only_files_of_rows_inside_the_workspace_are_opened(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "workspace"
    folder.mkdir()
    for file in (tmp_path / "out.jsonl", folder / ".env", folder / "config.yml"):
        file.write_text('{"prompt": "x"}\n', encoding="utf-8")
    (folder / "link.jsonl").symlink_to(tmp_path / "out.jsonl")
    with pytest.raises(InputError):
        RowFiles(Workspace(folder)).path(name)


def test_a_search_finds_rows_by_outcome_and_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [
        rollout_row(task_id=f"t{n}", success=n % 3 > 0, messages=[user(f"Task {n}")])
        for n in range(90)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    files = RowFiles(Workspace(tmp_path))
    wrong = rows_page(files, path, 0, show="wrong", query="")
    assert [row.number for row in wrong.rows] == list(range(1, 91, 3))
    assert wrong.after is None
    found = rows_page(files, path, 0, show="all", query="task 7")
    assert [row.title for row in found.rows] == ["Task 7", *(f"Task 7{n}" for n in range(10))]
    first = rows_page(files, path, 0, show="right", query="")
    assert len(first.rows) == 50
    rest = rows_page(files, path, first.after or 0, show="right", query="")
    assert [row.number for row in (*first.rows, *rest.rows)] == [n + 1 for n in range(90) if n % 3]
