"""Who answered, as endpoints say it: in each row, in the manifest, in the result and in notes."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes.chat_endpoint import ScriptedTeacher, Served
from fakes.reporters import KeptReporter
from fakes.rollout_rows import read_rows, write_rows
from fakes.rollout_runs import run_rollouts
from stillroom.errors import InputError
from stillroom.rollout.journal.journal import RolloutStore
from stillroom.rollout.results import AnswererWatch
from stillroom.settings import Workspace
from stillroom.teachers.providers import PROVIDERS
from stillroom.types import Answerer

OLD, NEW = {"model": "m-2026-05-01"}, {"model": "m-2026-09-01", "system_fingerprint": "fp_1"}


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"prompt {index}"} for index in range(3)])
    return Workspace(tmp_path)


def run_of(workspace: Workspace, teacher: ScriptedTeacher, **changes: Any) -> Any:
    reporter = KeptReporter()
    return run_rollouts(
        workspace, teacher.handle, reporter, **{"max_concurrency": 1, **changes}
    ), reporter.notes


def by_prompt(served: Served) -> Mapping[str, Any]:
    """The first prompt's second turn comes from another model, and all that follow."""
    return OLD if served.prompt == "prompt 0" and served.turn == 0 else NEW


def test_each_row_says_who_answered_it_and_a_change_is_told(workspace: Workspace) -> None:
    result, notes = run_of(workspace, ScriptedTeacher(reported=by_prompt))

    first, *others = read_rows(workspace.root / "out.jsonl")
    new = {"model": "m-2026-09-01", "fingerprint": "fp_1"}
    assert first["answered_by"] == [{"model": "m-2026-05-01", "fingerprint": None}, new]
    assert [row["answered_by"] for row in others] == [[new], [new]]
    assert result.answered_by == {"m-2026-05-01": 1, "m-2026-09-01": 3}
    assert notes[0] == "the endpoint reports 'm-2026-05-01' for the requested model 'm'"
    assert "'m-2026-09-01' (before: m-2026-05-01)" in notes[1]
    assert len(notes) == 2
    [model] = json.loads((workspace.root / "out.jsonl.manifest.json").read_bytes())["models"]
    assert sorted(model["answered_by"], key=lambda one: one["rows"]) == [
        {"model": "m-2026-05-01", "rows": 1, "fingerprints": []},
        {"model": "m-2026-09-01", "rows": 3, "fingerprints": ["fp_1"]},
    ]


def test_a_change_between_two_runs_is_told_and_all_rows_are_in_the_manifest(
    workspace: Workspace,
) -> None:
    run_of(workspace, ScriptedTeacher(reported=lambda _served: OLD), n=2)

    result, notes = run_of(workspace, ScriptedTeacher(reported=lambda _served: NEW))

    assert result.answered_by == {"m-2026-05-01": 2, "m-2026-09-01": 1}
    assert len(notes) == 1
    assert "the endpoint now answers requests for 'm' with" in notes[0]
    [model] = json.loads((workspace.root / "out.jsonl.manifest.json").read_bytes())["models"]
    assert [one["rows"] for one in model["answered_by"]] == [2, 1]


@pytest.mark.parametrize("reported", [{}, {"model": None}, {"model": ["m"]}, {"model": ""}])
def test_where_the_endpoint_does_not_say_it_nothing_is_made_up(
    workspace: Workspace, reported: dict[str, Any]
) -> None:
    result, notes = run_of(workspace, ScriptedTeacher(reported=lambda _served: reported))

    assert (result.answered_by, notes) == ({}, [])
    assert all(row["answered_by"] == [] for row in read_rows(workspace.root / "out.jsonl"))


def test_a_note_names_a_model_that_takes_no_temperature(
    workspace: Workspace,
) -> None:
    _result, notes = run_of(workspace, ScriptedTeacher(), model="claude-opus-4-7", temperature=0.2)
    assert notes == ["claude-opus-4-7 takes no temperature and no top_p: it uses its own"]


def test_a_providers_terms_are_told_before_the_first_call_and_kept(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", "k")
    provider = replace(PROVIDERS["openrouter"], base_url="http://openrouter.test/v1")
    monkeypatch.setitem(PROVIDERS, "openrouter", provider)
    hosted: dict[str, Any] = {"provider": "openrouter", "base_url": None}
    teacher, terms = ScriptedTeacher(), "https://openrouter.ai/terms"

    reported, _notes = run_of(workspace, teacher, dry_run=True, **hosted)
    assert (reported.terms, teacher.requested) == (terms, 0)
    _result, notes = run_of(workspace, teacher, **hosted)
    assert terms in notes[0]
    [model] = json.loads((workspace.root / "out.jsonl.manifest.json").read_bytes())["models"]
    assert (model["location"], model["terms"]) == ("openrouter", terms)
    reported, notes = run_of(workspace, teacher, dry_run=True, output="other.jsonl")
    assert (reported.terms, notes) == (None, [])


def test_the_name_that_was_asked_for_is_no_news() -> None:
    watch = AnswererWatch("m", [])

    assert list(watch.new_model_notes([Answerer(model="m")])) == []
    assert list(watch.new_model_notes([Answerer(model="m", fingerprint="fp_2")])) == []
    assert len(list(watch.new_model_notes([Answerer(model="n")]))) == 1
    assert list(watch.new_model_notes([Answerer(model="n"), Answerer(model="m")])) == []


def test_an_output_is_not_gone_on_with_by_other_weights(tmp_path: Path) -> None:
    output = tmp_path / "o.jsonl"
    output_settings = {"model": "m", "weights": "a1"}
    RolloutStore(output, output_settings).close(is_complete=False)
    output.write_text(
        '{"task_id": "t", "sample": 0, "reward": null, "success": null, "truncated": false}\n'
    )

    with pytest.raises(InputError, match="weights was 'a1', now 'b2'"):
        RolloutStore(output, {"model": "m", "weights": "b2"})
    # Not known is no change: a model of the hub that was not fetched yet.
    RolloutStore(output, {"model": "m", "weights": None}).close(is_complete=False)
    RolloutStore(output, {"model": "m"}).close(is_complete=False)
