"""`stillroom wait` in this process, on run folders whose states are set by hand."""

import json
import threading
from pathlib import Path

import msgspec
import pytest

from fakes.dashboards import kept_running
from stillroom.run_folder import RunFolder, create_run
from stillroom.settings import Workspace
from stillroom.types import RunKind, RunStatus
from stillroom_mcp.cli import main


def ended(root: Path, status: RunStatus, **fields) -> str:
    folder = create_run(Workspace(root), RunKind.SFT, {})
    folder.write(msgspec.structs.replace(folder.read(), status=status, **fields))
    return folder.run_id


def exit_code(root: Path, *words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["wait", *words, "--workspace", str(root)])
    return int(caught.value.code or 0)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (RunStatus.SUCCEEDED, 0),
        (RunStatus.FAILED, 1),
        (RunStatus.CANCELLED, 3),
        (RunStatus.INTERRUPTED, 4),
    ],
)
def test_the_exit_code_says_how_a_run_ended(tmp_path, capsys, status, code) -> None:
    run_id = ended(tmp_path, status)
    assert exit_code(tmp_path, run_id) == code
    told = capsys.readouterr().out
    assert told.startswith(f"{run_id} {status}")
    assert "\nnext: " in told


def test_of_several_runs_the_worst_counts_and_each_is_one_json_line(tmp_path, capsys) -> None:
    ids = [ended(tmp_path, RunStatus.SUCCEEDED), ended(tmp_path, RunStatus.CANCELLED)]
    assert exit_code(tmp_path, *ids, "--json") == 3
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["run_id"] for line in lines] == ids
    assert {line["answered_at"] for line in lines} == {"ended"}


def test_a_run_that_is_not_there_is_found_out_before_anything_is_waited_for(
    tmp_path, capsys
) -> None:
    running = _running(tmp_path)
    assert exit_code(tmp_path, running.run_id, "nope") == 2
    assert "stillroom list-runs" in capsys.readouterr().err


def test_it_gives_up_after_its_timeout_and_ends_at_an_alarm_if_asked(tmp_path, capsys) -> None:
    folder = _running(tmp_path)

    def alarm() -> None:
        folder.write(msgspec.structs.replace(folder.read(), alarms=["truncation: 30 %"]))

    with kept_running(folder.path):
        assert exit_code(tmp_path, folder.run_id, "--timeout", "0.01") == 124
        assert f"{folder.run_id} starting" in capsys.readouterr().out
        timer = threading.Timer(0.3, alarm)
        timer.start()
        assert exit_code(tmp_path, folder.run_id, "--alarms", "--timeout", "60") == 5
        timer.join(20)
    assert "truncation" in capsys.readouterr().out


def _running(root: Path) -> RunFolder:
    """A run whose process is still starting."""
    return create_run(Workspace(root), RunKind.SFT, {})
