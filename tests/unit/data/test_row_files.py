import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.mangling import JSON
from fakes.rollout_rows import rollout_row, write_rows
from stillroom.data.checks import Problem
from stillroom.data.row_files import RowReader, decode_line, read_row_lines, rollout_files
from stillroom.data.validate import ValidateDataset, validate_dataset
from stillroom.errors import DataError, InputError
from stillroom.settings import Workspace


def test_a_folder_stands_for_its_tables_and_documents(tmp_path: Path) -> None:
    names = ["b.jsonl", "a.jsonl", ".a.jsonl.partial-1", ".c.jsonl", "x.json"]
    names += ["a.jsonl.manifest.json", "rollout_10/sample_1.json", "rollout_2/sample_10.json"]
    names += ["rollout_2/sample_2.json", "rollout_2/x.jsonl", ".a.jsonl/settings.json"]
    for name in [*names, "rollout_2/deeper/y.json"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "sub.jsonl").mkdir()

    assert [str(path.relative_to(tmp_path)) for path in rollout_files(tmp_path)] == [
        "a.jsonl",
        "b.jsonl",
        "rollout_2/sample_2.json",
        "rollout_2/sample_10.json",
        "rollout_10/sample_1.json",
        "x.json",
    ]
    assert rollout_files(tmp_path / "x.json") == [tmp_path / "x.json"]
    with pytest.raises(DataError, match=r"no \.jsonl or \.json"):
        rollout_files(tmp_path / "sub.jsonl")


def test_lines_are_rows_whatever_the_file_is_called(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [rollout_row(), {"a": 1}]
    path = write_rows(tmp_path / "rows.json", rows)

    lines = list(read_row_lines(path))

    assert [json.loads(line.data) for line in lines] == rows
    assert [line.number for line in lines] == [1, 2]
    with RowReader() as reader:
        again = [reader.read(path, line.offset, line.num_bytes) for line in lines]
    assert again == [line.data for line in lines]


@given(
    st.dictionaries(st.text(max_size=5), JSON | st.text(max_size=8), min_size=1, max_size=4),
    st.sampled_from([1, 4, "\t"]),
    st.booleans(),
    st.booleans(),
)
def test_a_document_is_one_row_with_nothing_changed_but_blanks(
    tmp_path_factory: pytest.TempPathFactory, row: Any, indent: Any, has_bom: bool, is_ascii: bool
) -> None:
    path = tmp_path_factory.mktemp("rows") / "row.json"
    text = json.dumps(row, indent=indent, ensure_ascii=is_ascii).replace("\n", "\r\n")
    data = b"\xef\xbb\xbf" * has_bom + text.encode(errors="replace")
    path.write_bytes(data)

    [line] = read_row_lines(path)

    assert b"\n" not in line.data
    plain = json.dumps(row, ensure_ascii=is_ascii, separators=(",", ":"))
    assert line.data == plain.encode(errors="replace")
    with RowReader() as reader:
        assert reader.read(path, line.offset, line.num_bytes) == line.data


def test_a_broken_document_is_read_line_by_line_so_that_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b'{"a":\n{"b": 1}\n')

    assert [line.data for line in read_row_lines(path)] == [b'{"a":', b'{"b": 1}']
    path.write_bytes(b"\n \n")
    assert list(read_row_lines(path)) == []


def test_a_document_that_is_cut_off_is_one_broken_row(tmp_path: Path) -> None:
    path = tmp_path / "sample_1.json"
    path.write_text(json.dumps({"conversation": [{"role": "user"}] * 9}, indent=2)[:-40])

    [line] = read_row_lines(path)

    assert line.number == 1
    assert isinstance(decode_line(line), Problem)
    report = validate_dataset(
        Workspace(tmp_path), ValidateDataset(path=path.name, format="rollouts", report="none")
    ).report
    assert (report.rows, report.num_problems) == (1, 1)
    assert report.problems[0].where == f"{path}:1"
    assert "not valid JSON" in report.problems[0].problem


def test_a_file_whose_name_is_no_unicode_is_refused_with_words(tmp_path):
    name = os.fsdecode(b"caf\xe9.jsonl")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / name).write_text("{}\n")
    with pytest.raises(DataError, match="name is not UTF-8, so it cannot be recorded"):
        rollout_files(tmp_path / "rows")
    with pytest.raises(InputError, match="give a plain file path with a UTF-8 name"):
        Workspace(tmp_path).path(f"rows/{name}")
