import hashlib
import json
import re
from pathlib import Path

from stillroom import __version__
from stillroom.lineage import manifest_path, now, record_file, write_manifest


def test_the_time_is_utc_with_milliseconds() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", now())


def test_a_file_is_recorded_as_it_is_now(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abc")

    record = record_file(path)

    assert record.path == str(path)
    assert record.sha256 == hashlib.sha256(b"abc").hexdigest()
    assert record.num_bytes == 3


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
    }


def test_the_manifest_of_a_table_is_no_table_of_its_folder(tmp_path: Path) -> None:
    # A folder of rollouts is read by its *.jsonl files.
    assert manifest_path(tmp_path / "out.jsonl").suffix == ".json"
