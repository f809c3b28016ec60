import json

import pytest

from fakes.trace_files import SAMPLES, write_lines
from stillroom.errors import DataError, InputError
from stillroom.importing.foreign import ForeignRollout, open_foreign_rollouts
from stillroom.importing.request import ImportRollouts
from stillroom.importing.run import import_rollouts
from stillroom.importing.tally import RefusedRow
from stillroom.settings import Workspace


def opened(workspace, path):
    rows = list(open_foreign_rollouts(workspace, path))
    rollouts = [row for row in rows if isinstance(row, ForeignRollout)]
    return rollouts, [row for row in rows if isinstance(row, RefusedRow)]


@pytest.mark.parametrize("name", sorted(path.name for path in SAMPLES.iterdir()))
def test_rollouts_read_in_place_are_those_that_an_import_writes(name, tmp_path):
    workspace = Workspace(tmp_path)
    for file in sorted((SAMPLES / name).rglob("*")):
        if not file.is_file() or file.name.endswith(".seen.json"):
            continue
        path = tmp_path / file.name
        path.write_bytes(file.read_bytes())
        request = ImportRollouts(input=file.name, output="out/rollouts.jsonl", overwrite=True)
        try:
            import_rollouts(workspace, request)
        except (DataError, InputError):
            continue
        rollouts, refused = opened(workspace, path)
        output = tmp_path / "out" / "rollouts.jsonl"
        assert [rollout.data for rollout in rollouts] == output.read_bytes().splitlines()
        written = (tmp_path / "out" / "rollouts.jsonl.refused").read_bytes().splitlines()
        assert [row.source for row in refused] == [json.loads(line)["source"] for line in written]
        for rollout in rollouts:
            assert json.loads(rollout.data)["origin"]["source"] == rollout.source


def test_a_file_of_no_known_format_is_refused(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", {"a": 1})
    with pytest.raises(InputError, match="no format recognises it"):
        opened(Workspace(tmp_path), path)
