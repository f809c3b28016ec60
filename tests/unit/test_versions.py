import json
from pathlib import Path

import pytest

from fakes.rollout_rows import write_lines
from stillroom.errors import InputError
from stillroom.files import file_sha256
from stillroom.settings import Workspace
from stillroom.versions import copy_of, find_version, tag_file, versions_of, versions_with

WHEN = "2026-01-01T00:00:00.000Z"


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


def tag(workspace: Workspace, name: str, tag: str):
    path = workspace.root / name
    return tag_file(workspace.root, path, tag, created_at=WHEN, manifest=None)


def test_a_tag_finds_the_content_after_the_file_was_replaced(workspace: Workspace) -> None:
    path = write_lines(workspace.root / "data" / "train.jsonl", [b"old"])
    version = tag(workspace, "data/train.jsonl", "v1.0")
    assert version.name == "data/train@v1.0"
    assert workspace.existing("data/train@v1.0", label="input") == path

    write_lines(path, [b"new"])

    for given in ("data/train@v1.0", "data/train.jsonl@v1.0", str(path) + "@v1.0"):
        kept = workspace.existing(given, label="input")
        assert kept == copy_of(workspace.root, version)
        assert kept.read_bytes() == b"old\n"
    assert kept.suffix == ".jsonl"


@pytest.mark.parametrize("edit", ["append", "in place"])
def test_a_kept_copy_does_not_change_with_the_file(workspace: Workspace, edit: str) -> None:
    path = write_lines(workspace.root / "train.jsonl", [b"old"])
    tag(workspace, "train.jsonl", "v1")
    with path.open("ab" if edit == "append" else "r+b") as stream:
        stream.write(b"new")
    assert workspace.existing("train@v1", label="input").read_bytes() == b"old\n"


def test_a_content_is_found_by_its_hash_now_and_later(workspace: Workspace) -> None:
    path = write_lines(workspace.root / "train.jsonl", [b"old"])
    digits = file_sha256(path)[:8]
    assert workspace.existing(f"train@{digits}", label="input") == path
    tag(workspace, "train.jsonl", "v1")
    write_lines(path, [b"new"])
    assert workspace.existing(f"train@{digits}", label="input").read_bytes() == b"old\n"


def test_other_content_than_the_hash_says_is_refused_and_what_there_is_is_told(
    workspace: Workspace,
) -> None:
    path = write_lines(workspace.root / "train.jsonl", [b"old"])
    digits = file_sha256(path)[:8]
    tag(workspace, "train.jsonl", "v1")
    write_lines(path, [b"new"])
    now = file_sha256(path)[:8]

    with pytest.raises(InputError, match="has other content, and no intact tagged copy") as refused:
        workspace.existing("train@00000000", label="input")

    assert f"train@{now} (current content)" in refused.value.fix
    assert f"train@v1 ({digits})" in refused.value.fix


def test_a_tag_never_changes_its_meaning(workspace: Workspace) -> None:
    path = write_lines(workspace.root / "train.jsonl", [b"old"])
    first = tag(workspace, "train.jsonl", "v1")
    assert tag(workspace, "train.jsonl", "v1") == first
    write_lines(path, [b"new"])

    with pytest.raises(InputError, match="names other content"):
        tag(workspace, "train.jsonl", "v1")

    assert [v.sha256 for v in versions_of(workspace.root, path)] == [first.sha256]
    assert len(list((workspace.root / ".stillroom" / "datasets").iterdir())) == 1
    assert tag(workspace, "train.jsonl", "v2").sha256 != first.sha256


def test_a_damaged_copy_is_refused(workspace: Workspace) -> None:
    path = write_lines(workspace.root / "train.jsonl", [b"old"])
    copy = copy_of(workspace.root, tag(workspace, "train.jsonl", "v1"))
    write_lines(path, [b"new"])
    copy.chmod(0o644)
    copy.write_bytes(b"odd\n")
    with pytest.raises(InputError, match="damaged or missing"):
        workspace.existing("train@v1", label="input")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("v 1", "is not allowed"),
        ("../v1", "is not allowed"),
        ("", "is not allowed"),
        ("deadbeef", "looks like a hash"),
    ],
)
def test_a_tag_that_could_be_something_else_is_refused(
    workspace: Workspace, given: str, expected: str
) -> None:
    write_lines(workspace.root / "train.jsonl", [b"old"])
    with pytest.raises(InputError, match=expected):
        tag(workspace, "train.jsonl", given)
    assert not (workspace.root / ".stillroom").exists()


def test_what_is_outside_the_workspace_has_no_tags(workspace: Workspace, tmp_path: Path) -> None:
    outside = write_lines(tmp_path.parent / "outside.jsonl", [b"x"])
    with pytest.raises(InputError, match="outside the workspace"):
        tag_file(workspace.root, outside, "v1", created_at=WHEN, manifest=None)


def test_a_file_whose_own_name_has_an_at_sign_is_that_file(workspace: Workspace) -> None:
    path = write_lines(workspace.root / "train@v1", [b"own"])
    write_lines(workspace.root / "train.jsonl", [b"old"])
    tag(workspace, "train.jsonl", "v1")
    assert workspace.existing("train@v1", label="input") == path


def test_names_without_a_version_are_no_versions(workspace: Workspace) -> None:
    for given in ("train.jsonl", "@v1", "a@b/c.jsonl", "train@"):
        assert find_version(workspace.root, given) is None


def test_an_unknown_version_says_which_there_are(workspace: Workspace) -> None:
    write_lines(workspace.root / "train.jsonl", [b"old"])
    tag(workspace, "train.jsonl", "v1")
    with pytest.raises(InputError, match=r"no version 'train@v2'|no version") as refused:
        workspace.existing("train@v2", label="input")
    assert "train@v1" in refused.value.fix


def test_files_whose_names_begin_alike_keep_their_own_tags(workspace: Workspace) -> None:
    one = write_lines(workspace.root / "train.jsonl", [b"one"])
    other = write_lines(workspace.root / "train@x.jsonl", [b"other"])
    tag(workspace, "train.jsonl", "v1")
    tag(workspace, "train@x.jsonl", "v2")
    assert [v.tag for v in versions_of(workspace.root, one)] == ["v1"]
    assert [v.tag for v in versions_of(workspace.root, other)] == ["v2"]


def test_the_record_of_a_tag_says_what_made_the_content(workspace: Workspace) -> None:
    path = write_lines(workspace.root / "train.jsonl", [b"old"])
    manifest = {"operation": "convert_rollouts"}
    version = tag_file(workspace.root, path, "v1", created_at=WHEN, manifest=manifest)
    record = workspace.root / ".stillroom" / "tags" / "train.jsonl@v1.json"
    assert json.loads(record.read_bytes())["manifest"] == manifest
    assert versions_with(workspace.root, version.sha256) == [version]
