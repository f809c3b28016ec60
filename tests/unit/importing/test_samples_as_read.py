"""Everything that is read of each format's samples, in golden files that were read by eye."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fakes.trace_files import SAMPLES, read, sample_files
from stillroom.importing.formats.table import FORMATS

GOLDEN = Path(__file__).parents[2] / "golden" / "traces"


def as_read(name: str) -> list[dict[str, Any]]:
    """What is known of each row of a format's samples, without fields that are empty."""
    files = [path for path in sample_files() if path.is_relative_to(SAMPLES / name)]
    items = []
    for row in read(name, *files):
        fields = {field: getattr(row, field) for field in row.__slots__}
        fields["location"] = str(row.location).removeprefix(f"{SAMPLES}/")
        fields["merged_from"] = [str(location) for location in fields.get("merged_from", ())]
        known = {
            field: value for field, value in fields.items() if value not in (None, "", [], {}, ())
        }
        items.append({"kind": type(row).__name__} | msgspec.to_builtins(known, enc_hook=str))
    text = json.dumps(items, ensure_ascii=False).replace(f"{SAMPLES}/", "")
    return json.loads(text)


@pytest.mark.parametrize("name", [form.name for form in FORMATS])
def test_samples_are_read_as_their_golden_file_has_them(
    name: str, request: pytest.FixtureRequest
) -> None:
    path, found = GOLDEN / f"{name}.json", as_read(name)
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
    assert found == json.loads(path.read_text("utf-8"))
