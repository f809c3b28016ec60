"""A run on another machine finds files by the paths that they have at home, and records those."""

from pathlib import Path

import pytest

from stillroom.home_paths import home_path, home_variable, is_remote_process, local_path
from stillroom.settings import Workspace

PAIRS = [
    ("/home/me/proj", "/srv/r/x/workspace"),
    ("/data/hf/base", "/srv/r/x/outside/data/hf/base"),
    ("/home/me/proj/models/base", "/srv/r/x/outside/data/hf/base"),
    ("/venv/lib/stillroom", "/srv/code/1/stillroom"),
    ("~", "/home/me"),
]


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in home_variable(PAIRS).items():
        monkeypatch.setenv(name, value)


def test_at_home_every_path_stays_as_it_is():
    assert not is_remote_process()
    assert home_path("/home/me/../x") == "/home/me/../x"
    assert local_path("~/x") == Path("~/x")


@pytest.mark.usefixtures("away")
@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("/home/me/proj/train.jsonl", "/srv/r/x/workspace/train.jsonl"),
        ("/home/me/proj", "/srv/r/x/workspace"),
        ("/home/me/project/train.jsonl", "/home/me/project/train.jsonl"),
        ("/home/me/proj/models/base/config.json", "/srv/r/x/outside/data/hf/base/config.json"),
        ("/srv/r/x/workspace/a.jsonl", "/srv/r/x/workspace/a.jsonl"),
        ("/srv/r/x/workspace/../../../data/hf/base", "/srv/r/x/outside/data/hf/base"),
        ("~/proj/a", "/srv/r/x/workspace/a"),
        ("a/b.jsonl", "a/b.jsonl"),
        ("/elsewhere/x", "/elsewhere/x"),
        ("/venv/lib/stillroom/demo/student", "/srv/code/1/stillroom/demo/student"),
    ],
)
def test_a_name_leads_to_the_file_that_stands_for_it(name, found):
    assert str(local_path(name)) == found
    assert local_path(local_path(name)) == local_path(name)


@pytest.mark.usefixtures("away")
def test_what_is_recorded_names_the_file_at_home():
    assert home_path("/srv/r/x/workspace/runs/sft-1/log") == "/home/me/proj/runs/sft-1/log"
    assert home_path("/srv/r/x/outside/data/hf/base") == "/data/hf/base"
    assert home_path("/srv/r/x/workspaces") == "/srv/r/x/workspaces"
    assert home_path("/home/me/proj/a") == "/home/me/proj/a"


def test_a_workspace_finds_what_requests_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = tmp_path / "workspace"
    outside = tmp_path / "outside" / "shared"
    root.mkdir()
    outside.mkdir(parents=True)
    (outside / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    pairs = [("/home/me/proj", str(root)), ("/home/me/shared", str(outside)), ("~", "/home/me")]
    for name, value in home_variable(pairs).items():
        monkeypatch.setenv(name, value)
    workspace = Workspace(root)
    for name in ("../shared/rows.jsonl", "~/shared/rows.jsonl", "/home/me/shared/rows.jsonl"):
        assert workspace.existing(name, label="input") == outside / "rows.jsonl"
    assert workspace.writable("/home/me/proj/out.jsonl", label="output") == root / "out.jsonl"
    assert workspace.shown(outside / "rows.jsonl") == "/home/me/shared/rows.jsonl"
