from pathlib import Path

import pytest

from stillroom.errors import InputError
from stillroom.settings import (
    Workspace,
    open_workspace,
)

ODD_PATHS = [
    "a\0b",
    "~nobody-of-this-name/file",
    "x" * 300,
    "\ud800",
    "a/" * 3000,
]


@pytest.mark.parametrize("given", ODD_PATHS)
def test_a_path_no_system_takes_is_an_error_with_a_fix(tmp_path: Path, given: str) -> None:
    workspace = Workspace(tmp_path)

    for use in (workspace.existing, workspace.writable):
        with pytest.raises(InputError):
            use(given, label="input")


def test_a_relative_path_is_one_inside_the_workspace(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)

    assert workspace.path("data/x.jsonl") == tmp_path / "data" / "x.jsonl"
    assert workspace.path("/etc/hosts") == Path("/etc/hosts")
    assert workspace.runs == tmp_path / "runs"


def test_a_missing_file_is_answered_with_the_names_that_are_there(tmp_path: Path) -> None:
    for name in [*"abcdefghi", ".hidden"]:
        (tmp_path / name).touch()

    with pytest.raises(InputError) as caught:
        Workspace(tmp_path).existing("promts.jsonl", label="input")

    assert "input 'promts.jsonl' does not exist" in caught.value.problem
    assert "a, b, c, d, e, f, g, h, …" in caught.value.fix
    assert "hidden" not in caught.value.fix


@pytest.mark.parametrize("given", ["missing.jsonl", "no/such/folder/x"])
def test_a_missing_file_in_an_empty_place_has_a_fix_too(tmp_path: Path, given: str) -> None:
    with pytest.raises(InputError, match="relative to"):
        Workspace(tmp_path).existing(given, label="input")


@pytest.mark.parametrize(
    "given",
    ["../x", "/x", "data/../../x", "a/../../x", "link/x", "link", "dangling", "dangling/deep/x"],
)
def test_nothing_is_written_outside_the_workspace(tmp_path: Path, given: str) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "link").symlink_to(outside)
    (root / "dangling").symlink_to(tmp_path / "not there yet")

    with pytest.raises(InputError, match="outside the workspace"):
        Workspace(root).writable(given, label="output")


@pytest.mark.parametrize("given", ["", ".", "folder", "inner"])
def test_a_folder_is_no_output(tmp_path: Path, given: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "inner").symlink_to(tmp_path / "folder")

    with pytest.raises(InputError, match="folder"):
        Workspace(tmp_path).output_file(given, label="output")


def test_a_link_that_leads_to_itself_is_an_error_with_a_fix(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")

    for use in (Workspace(tmp_path).existing, Workspace(tmp_path).writable):
        with pytest.raises(InputError):
            use("loop", label="output")


def test_paths_inside_the_workspace_can_be_written(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "real").mkdir(parents=True)
    (root / "inner").symlink_to(root / "real")
    (tmp_path / "way in").symlink_to(root)

    workspace = Workspace(tmp_path / "way in")

    assert workspace.writable("new/out.jsonl", label="output") == root / "new" / "out.jsonl"
    assert workspace.writable("inner/x", label="output") == root / "real" / "x"
    assert workspace.writable(root / "ünï", label="output") == root / "ünï"


def test_a_path_is_shown_relative_to_the_workspace(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)

    assert workspace.shown(tmp_path / "data" / "x") == "data/x"
    assert workspace.shown(Path("/etc/hosts")) == "/etc/hosts"


def test_the_workspace_is_the_one_named_then_the_environments_then_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, variable, here = (tmp_path / name for name in ("named", "variable", "here"))
    for folder in (named, variable, here):
        folder.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("STILLROOM_WORKSPACE", str(variable))

    assert open_workspace(named).root == named
    assert open_workspace().root == variable
    monkeypatch.delenv("STILLROOM_WORKSPACE")
    assert open_workspace().root == here
    assert open_workspace("../named").root.resolve() == named


def test_a_workspace_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    for given in (tmp_path / "file", tmp_path / "none", "~nobody-of-this-name/x"):
        with pytest.raises(InputError, match="is not a folder"):
            open_workspace(given)


def test_a_file_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("x", encoding="utf-8")

    with pytest.raises(InputError, match="inside notes, which is a file"):
        Workspace(tmp_path).output_file("notes/a/b.jsonl", label="output")
    made = Workspace(tmp_path).output_file("new/folder/b.jsonl", label="output")
    assert made == tmp_path / "new" / "folder" / "b.jsonl"
