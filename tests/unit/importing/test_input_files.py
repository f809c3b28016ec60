"""Packed files and standard input."""

import errno
import gzip
import io
import json
import shutil
from pathlib import Path

import pytest

from fakes.foreign_rollouts import RNOW_ROW, write_stored_rnow
from fakes.trace_files import SAMPLES
from stillroom.errors import InputError, MissingExtraError
from stillroom.importing import input_files
from stillroom.importing.input_files import with_standard_input, zstd_library
from stillroom.importing.request import ImportRollouts
from stillroom.importing.run import import_rollouts
from stillroom.lineage import read_manifest, record_file
from stillroom.settings import Workspace
from stillroom.trace.request import ShowLineage
from stillroom.trace.show import show_lineage

ROWS = [
    {"request": {"messages": [{"role": "user", "content": f"q{n}"}]},
     "response": {"choices": [{"message": {"role": "assistant", "content": f"a{n}"}}]}}
    for n in range(3)
]  # fmt: skip
ZSTANDARD = zstd_library()
PACKED = [(".gz", gzip.compress), (".zst", ZSTANDARD.compress)]
LOG = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


def imported(folder, *names, **options):
    request = ImportRollouts(input=names, output="out.jsonl", **options)
    made = import_rollouts(Workspace(folder), request)
    rows = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    return made, rows


@pytest.mark.parametrize(("end", "pack"), PACKED)
def test_packed_files_are_read_as_what_they_hold(end, pack, tmp_path):
    (tmp_path / "calls.jsonl").write_bytes(LOG)
    plain, expected = imported(tmp_path, "calls.jsonl")
    (tmp_path / "calls.jsonl").unlink()
    # Logs to which several processes append have several members.
    (tmp_path / f"calls.jsonl{end}").write_bytes(pack(LOG[:100]) + pack(LOG[100:]))
    (tmp_path / f"pairs.csv{end}").write_bytes(pack(b"question,answer\nx,y\n"))
    made, rows = imported(tmp_path, f"calls.jsonl{end}", f"pairs.csv{end}", overwrite=True)
    assert (made.kept, plain.kept) == (4, 3)
    assert [row["messages"] for row in rows[:3]] == [row["messages"] for row in expected]
    assert [row["origin"]["source"] for row in rows] == [
        *(f"calls.jsonl{end}:{n}" for n in (1, 2, 3)),
        f"pairs.csv{end}:2",
    ]
    manifest = read_manifest(tmp_path / "out.jsonl")
    assert manifest.inputs[0] == record_file(tmp_path / f"calls.jsonl{end}")
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []
    shown = show_lineage(Workspace(tmp_path), ShowLineage(path="out.jsonl", row="1"))
    assert f"calls.jsonl{end}:1" in str(shown)


@pytest.mark.parametrize(
    ("name", "places", "pattern"),
    [
        ("verifiers", ["run"], "run/results.jsonl"),
        ("atif", ["trial/agent"], "trial/agent/codex.json"),
        ("openhands", ["."], "shop/events/*.json"),
        ("openai_batch", ["a", "b"], "?/*.jsonl"),
    ],
)
def test_packed_files_are_read_with_the_files_next_to_them(name, places, pattern, tmp_path):
    for place in places:
        shutil.copytree(SAMPLES / name, tmp_path / place, dirs_exist_ok=True)
    if name == "atif":
        result = {"verifier_result": {"rewards": {"reward": 1}}}
        (tmp_path / "trial" / "result.json").write_text(json.dumps(result))
    plain, expected = imported(tmp_path, pattern)
    for file in list(tmp_path.glob(pattern)):
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()

    made, rows = imported(tmp_path, f"{pattern}.gz", overwrite=True)

    assert (made.kept, made.refused, made.models) == (plain.kept, plain.refused, plain.models)
    for field in ("messages", "reward", "teacher"):
        assert [row.get(field) for row in rows] == [row.get(field) for row in expected]


def test_a_packed_file_is_read_on_a_file_system_without_links(tmp_path, monkeypatch):
    def refuse(self: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    (tmp_path / "calls.jsonl.gz").write_bytes(gzip.compress(LOG))
    made, _ = imported(tmp_path, "calls.jsonl.gz")
    assert (made.kept, made.refused) == (3, 0)


@pytest.mark.parametrize(("end", "pack"), PACKED)
def test_of_a_cut_file_what_is_there_is_read_and_the_end_is_refused(end, pack, tmp_path):
    # Zstandard gives back whole blocks alone.
    data = pack(LOG)[:-9] if end == ".gz" else pack(LOG) + pack(LOG)[:-9]
    (tmp_path / f"calls.jsonl{end}").write_bytes(data)
    made, _ = imported(tmp_path, f"calls.jsonl{end}")
    assert made.read == made.kept + made.merged + made.refused
    assert made.kept >= 2
    assert made.refused_by_reason[input_files.PARTLY_DECOMPRESSED] == 1
    assert any(f"calls.jsonl{end}:1" in problem for problem in made.problems)


def test_what_is_not_packed_is_refused_by_name_and_skipped_in_folders(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.jsonl").write_bytes(LOG)
    (tmp_path / "logs" / "b.jsonl.gz").write_bytes(b"plain")
    (tmp_path / "logs" / "c.jsonl.zst").write_bytes(b"plain")
    (tmp_path / "logs" / "credentials.json.gz").write_bytes(gzip.compress(LOG))
    made, _ = imported(tmp_path, "logs")
    assert (made.kept, made.refused_by_reason) == (3, {"unknown format": 3})
    with pytest.raises(
        InputError, match=r"b\.jsonl\.gz cannot be decompressed: Not a gzipped file"
    ):
        imported(tmp_path, "logs/b.jsonl.gz", overwrite=True)
    with pytest.raises(
        InputError, match=r"c\.jsonl\.zst cannot be decompressed: Unable to decompress"
    ):
        imported(tmp_path, "logs/c.jsonl.zst", overwrite=True)
    with pytest.raises(InputError, match="cannot be read"):
        imported(tmp_path, "logs/credentials.json.gz", overwrite=True)


@pytest.mark.parametrize(("end", "pack"), PACKED)
def test_a_file_that_unpacks_to_far_more_than_a_log_is_refused(end, pack, tmp_path, monkeypatch):
    monkeypatch.setattr(input_files, "_MIN_LIMIT", 3 << 20)
    (tmp_path / f"calls.jsonl{end}").write_bytes(pack(LOG + b" " * (6 << 20)))
    with pytest.raises(InputError, match="decompresses to more than"):
        imported(tmp_path, f"calls.jsonl{end}")
    assert [file.name for file in tmp_path.iterdir() if "unpacked" in file.name] == []


def test_what_a_killed_import_unpacked_is_removed(tmp_path):
    leftover = tmp_path / ".out.jsonl.unpacked-x"
    (leftover / "0").mkdir(parents=True)
    (tmp_path / "calls.jsonl").write_bytes(LOG)
    imported(tmp_path, "calls.jsonl")
    assert not leftover.exists()


def test_a_file_that_asks_for_much_memory_is_not_unpacked(tmp_path):
    window = {ZSTANDARD.CompressionParameter.window_log: 28}
    stream = ZSTANDARD.ZstdCompressor(options=window)
    (tmp_path / "calls.jsonl.zst").write_bytes(stream.compress(LOG) + stream.flush())
    with pytest.raises(InputError, match="too much memory"):
        imported(tmp_path, "calls.jsonl.zst")


def test_without_the_library_for_zst_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(input_files, "zstd_library", lambda: None)
    (tmp_path / "calls.jsonl.zst").write_bytes(ZSTANDARD.compress(LOG))
    with pytest.raises(MissingExtraError, match=r"pip install 'stillroom\[traces\]'"):
        imported(tmp_path, "calls.jsonl.zst")


ROW = b'{"messages": [{"role": "user", "content": "Hi"}], "response": "Hello"}\n'


def test_what_is_piped_in_is_kept_beside_the_output_once(tmp_path):
    workspace = Workspace(tmp_path)
    request = ImportRollouts(input=("-",), output="out.jsonl")
    for _ in range(2):
        again = with_standard_input(workspace, request, io.BytesIO(ROW))
        assert import_rollouts(workspace, again).kept == 1
    [kept] = tmp_path.glob("out.stdin-*.jsonl")
    assert again.inputs == (kept.name,)
    assert kept.read_bytes() == ROW
    assert with_standard_input(workspace, again, io.BytesIO(b"unread")) is again


def test_empty_standard_input_is_an_error_and_leaves_nothing(tmp_path):
    request = ImportRollouts(input="-", output="out.jsonl")
    with pytest.raises(InputError, match="is empty"):
        with_standard_input(Workspace(tmp_path), request, io.BytesIO())
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(
        InputError, match="standard input, which is available on the command line only"
    ):
        import_rollouts(Workspace(tmp_path), request)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("lost", [1, 2, 30])
def test_of_a_list_that_is_cut_off_whole_elements_are_kept_and_the_rest_is_one_refusal(
    tmp_path, indent, lost
):
    text = json.dumps(ROWS, indent=indent)
    (tmp_path / "calls.json").write_text(text[:-lost], "utf-8")
    whole = len(ROWS) - (0 if lost == 1 or (lost == 2 and indent) else 1)

    made, _ = imported(tmp_path, "calls.json")

    assert (made.kept, made.refused) == (whole, 1)
    assert made.refused_by_reason == {"the file is cut off here": 1}
    assert made.problems[0].startswith(f"calls.json:{whole + 1}: the file is cut off here ")
    assert f"{whole} elements before this are complete" in made.problems[0]


def test_of_a_field_that_is_cut_off_whole_elements_are_kept_and_the_rest_is_one_refusal(tmp_path):
    write_stored_rnow(tmp_path / "r.txt", RNOW_ROW, RNOW_ROW | {"id": "b"})
    text = (tmp_path / "r.txt").read_text("utf-8")
    (tmp_path / "r.txt").write_text(text[: text.index('"b"') + 40], "utf-8")

    made, _ = imported(tmp_path, "r.txt")

    assert (made.kept, made.refused_by_reason) == (1, {"the file is cut off here": 1})
    (tmp_path / "r.txt").write_text(text[: text.index("--- Full")], "utf-8")
    with pytest.raises(InputError, match="unknown format"):
        imported(tmp_path, "r.txt", overwrite=True)
