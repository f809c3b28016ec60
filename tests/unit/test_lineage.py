import hashlib
import json
import re
from pathlib import Path

import pytest

from stillroom import __version__
from stillroom.errors import DataError
from stillroom.lineage import (
    ModelRecord,
    Recording,
    manifest_path,
    now,
    read_manifest,
    record_file,
    record_folder,
    write_manifest,
)


def test_the_time_is_utc_with_milliseconds() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", now())


def test_a_manifest_says_what_the_output_was_made_from(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"in\n")
    output.write_bytes(b"out\n")

    path = write_manifest(
        output,
        operation="convert_rollouts",
        inputs=[source],
        request={"include_failed": False},
        counts={"read": 1},
        run_id="run",
    )

    assert path == manifest_path(output) == tmp_path / "out.jsonl.manifest.json"
    manifest = json.loads(path.read_bytes())
    assert manifest.pop("created_at") <= now()
    assert manifest == {
        "operation": "convert_rollouts",
        "output": {
            "path": str(output),
            "sha256": hashlib.sha256(b"out\n").hexdigest(),
            "num_bytes": 4,
        },
        "inputs": [
            {
                "path": str(source),
                "sha256": hashlib.sha256(b"in\n").hexdigest(),
                "num_bytes": 3,
            }
        ],
        "request": {"include_failed": False},
        "counts": {"read": 1},
        "run_id": "run",
        "stillroom_version": __version__,
        "models": [],
        "side": [],
        "left_out": {},
    }


def test_a_manifest_tells_models_from_files(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_bytes(b"out\n")
    model = ModelRecord(role="policy", name="m", location="openai")
    write_manifest(output, operation="x", inputs=[model, output], request={}, counts={})
    manifest = read_manifest(output)
    assert manifest is not None
    assert manifest.models == [model]
    assert manifest.inputs == [record_file(output)]


def test_the_hash_of_a_folder_is_that_of_its_names_and_contents(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "b").write_bytes(b"b")
    (folder / "sub" / "a").write_bytes(b"a")
    listed = "".join(
        f"{hashlib.sha256(text).hexdigest()}  {name}\n"
        for text, name in ((b"b", "b"), (b"a", "sub/a"))
    )
    first = record_folder(folder)
    assert first.sha256 == hashlib.sha256(listed.encode()).hexdigest()
    assert first.num_bytes == 2

    (folder / ".cache").write_bytes(b"hidden")
    write_manifest(folder, written=first, operation="x", inputs=[], request={}, counts={})
    assert record_folder(folder) == first

    (folder / "b").rename(folder / "c")
    assert record_folder(folder).sha256 != first.sha256


def test_a_damaged_manifest_is_told(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    assert read_manifest(output) is None
    manifest_path(output).write_bytes(b"{")
    with pytest.raises(DataError, match="is damaged"):
        read_manifest(output)


def test_a_file_that_changes_while_it_is_read_is_not_put_on_record(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"{}\n")

    with Recording([path]) as recording:
        path.write_bytes(b"{}\n{}\n")
        with pytest.raises(DataError, match=f"{path} changed while it was being read"):
            recording.records()
    with Recording([path]) as recording:
        first = recording.records()
        # Training reads its rows once, and writes their record with each checkpoint.
        path.write_bytes(b"")
        assert recording.records() == first
