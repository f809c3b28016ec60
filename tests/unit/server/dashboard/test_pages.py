"""What the dashboard's pages offer first: runs to compare, an output to trace, a way to begin."""

import os
import re
from pathlib import Path

import pytest

from fakes.dashboards import client_of
from fakes.run_folders import evaluate, write_run, write_training
from stillroom.lineage import FileRecord, write_manifest

ID = "sft-abcdefghjkmnpqrstuvwxyz234"


def page_of(folder: Path, address: str) -> str:
    """Returns a page's text as one line, without the tags around commands."""
    answer = client_of(folder).get(address)
    assert answer.status_code == 200
    return " ".join(answer.text.replace("<code>", "").replace("</code>", "").split())


def chosen(page: str) -> list[str]:
    """Returns the options that are selected, in the order of the form."""
    return re.findall(r'<option value="([^"]*)" selected>', page)


def write_output(path: Path, *, second: int) -> None:
    """Writes a file with its manifest, written at this second."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}\n", encoding="utf-8")
    made = write_manifest(path, operation="filter_dataset", inputs=[], request={}, counts={})
    os.utime(made, (second, second))


def test_a_comparison_offers_the_newest_run_and_an_earlier_one_of_its_kind(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for minute, name in enumerate(("sft-a", "sft-b", "evaluate-c", "export-d")):
        write_run(runs, name, minute=minute)
    assert chosen(page_of(tmp_path, "/compare")) == ["sft-a", "sft-b"]
    assert chosen(page_of(tmp_path, "/compare?a=sft-b")) == ["sft-b", "sft-a"]
    assert chosen(page_of(tmp_path, "/compare?b=evaluate-c")) == ["export-d", "evaluate-c"]
    assert chosen(page_of(tmp_path, "/compare?a=sft-b&b=sft-a")) == ["sft-b", "sft-a"]


def test_a_comparison_of_chosen_runs_names_them_however_old_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stillroom_mcp.dashboard.app._MAX_COMPARED", 1)
    for minute, name in enumerate(("sft-a", "sft-b", "sft-c")):
        write_run(tmp_path / "runs", name, minute=minute)
    assert chosen(page_of(tmp_path, "/compare?a=sft-a&b=sft-b")) == ["sft-a", "sft-b"]


def test_a_comparison_without_two_runs_says_what_it_needs(tmp_path: Path) -> None:
    page = page_of(tmp_path, "/compare")
    assert "needs two runs; this workspace has none yet. Start them" in page
    assert "<select" not in page
    write_run(tmp_path / "runs", "sft-a")
    assert "has only one. Start another" in page_of(tmp_path, "/compare")


def test_evaluations_on_different_tasks_are_not_offered_as_one_twice(tmp_path: Path) -> None:
    evaluate(tmp_path / "runs", "base", {1}, minute=0, data="a.jsonl", total=1)
    evaluate(tmp_path / "runs", "after", {2, 3}, minute=1, data="b.jsonl", total=5)
    assert chosen(page_of(tmp_path, "/evaluations")) == ["evaluate-base", "evaluate-after"]


def test_lineage_begins_with_the_newest_output(tmp_path: Path) -> None:
    write_output(tmp_path / "new.jsonl", second=200)
    write_output(tmp_path / "runs" / "evaluate-a" / "rollouts.jsonl", second=100)
    write_output(tmp_path / ".hidden" / "newest.jsonl", second=300)
    write_output(tmp_path / "gone.jsonl", second=400)
    (tmp_path / "gone.jsonl").unlink()
    page = page_of(tmp_path, "/lineage")
    assert 'value="new.jsonl"' in page
    assert "by filter_dataset" in page
    assert "The newest output of this workspace" in page
    assert "The newest output" not in page_of(tmp_path, "/lineage?path=new.jsonl")


def test_lineage_that_nobody_asked_for_does_not_hash_large_files(tmp_path: Path) -> None:
    output = tmp_path / "new.jsonl"
    output.touch()
    os.truncate(output, 65 << 20)
    record = FileRecord(path=str(output), sha256="0" * 64, num_bytes=65 << 20)
    write_manifest(
        output, written=record, operation="filter_dataset", inputs=[], request={}, counts={}
    )
    changed = "has changed since it was used"
    assert changed not in page_of(tmp_path, "/lineage")
    assert changed in page_of(tmp_path, "/lineage?path=new.jsonl")


def test_lineage_begins_with_a_checkpoint_that_is_newer_than_all_files(tmp_path: Path) -> None:
    write_output(tmp_path / "old.jsonl", second=100)
    final = tmp_path / "runs" / "sft-a" / "checkpoints" / "final"
    write_output(final / "model.safetensors", second=200)
    made = final / "model.safetensors.manifest.json"
    made.rename(final / "stillroom.manifest.json")
    assert 'value="runs/sft-a/checkpoints/final"' in page_of(tmp_path, "/lineage")


def test_an_unreadable_manifest_leaves_the_form_of_lineage(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    (tmp_path / "rows.jsonl.manifest.json").write_text("{", encoding="utf-8")
    page = page_of(tmp_path, "/lineage")
    assert "Enter the path of a file, run or checkpoint" in page
    assert "no outputs yet" not in page


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("/", "create a project with stillroom create-project in this folder"),
        ("/data", "start from a template with stillroom create-project"),
        ("/evaluations", "with stillroom evaluate-model or through your coding agent"),
        ("/lineage", "This workspace has no outputs yet"),
    ],
)
def test_an_empty_workspace_says_what_to_do_first(tmp_path: Path, address: str, said: str) -> None:
    assert said in page_of(tmp_path, address)


def test_a_failed_run_shows_its_error_and_fix_above_its_figures(tmp_path: Path) -> None:
    error = {"problem": "out of memory", "fix": "lower data.batch_size"}
    write_run(tmp_path / "runs", "sft-a", status="failed", error=error)
    page = page_of(tmp_path, "/runs/sft-a")
    assert page.index("out of memory") < page.index("Fix: lower") < page.index('class="figures"')
    assert "Related pages" not in page


@pytest.mark.parametrize("address", ["/", "/data", f"/runs/{ID}", f"/compare?a={ID}&b=sft-b"])
def test_ids_are_short_and_whole_in_the_title(tmp_path: Path, address: str) -> None:
    write_training(tmp_path / "runs", ID, [{"loss": 1.0}])
    write_training(tmp_path / "runs", "sft-b", [{"loss": 1.0}])
    (tmp_path / "runs" / ID / "rollouts.jsonl").write_text("{}\n", encoding="utf-8")
    page = page_of(tmp_path, address)
    assert re.search(rf'title="(runs/)?{ID}', page)
    assert re.search(r">\s*(runs/)?sft-abcdef\b", page)
    assert f">{ID}<" not in page


def test_a_run_shows_its_whole_id_to_copy(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", ID)
    assert f"Run id: {ID}" in page_of(tmp_path, f"/runs/{ID}")
