import io

import pytest

from stillroom.errors import InputError
from stillroom.importing.input_files import with_standard_input
from stillroom.importing.request import ImportRollouts
from stillroom.importing.run import import_rollouts
from stillroom.settings import Workspace

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
    with pytest.raises(InputError, match="standard input, which only the command line has"):
        import_rollouts(Workspace(tmp_path), request)
