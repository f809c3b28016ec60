"""What import_rollouts reads can be converted, filtered, paired, shown and reviewed as it is."""

import json
import shutil
from pathlib import Path

import pytest

from fakes.foreign_rollouts import RNOW_ROW, write_rnow, write_stored_rnow
from fakes.rollout_rows import read_rows, write_rows
from stillroom.api.curation import inspect_examples, sample_for_review, validate_dataset
from stillroom.api.start_runs import score_rollouts
from stillroom.curate.convert import ConvertRollouts, convert_rollouts
from stillroom.curate.filter.request import DroppedRow, FilterDataset
from stillroom.curate.filter.run import filter_dataset
from stillroom.curate.pairs import MakeDpoPairs, make_dpo_pairs
from stillroom.curate.review import SampleForReview
from stillroom.curate.sources import check_needs_no_import
from stillroom.data.formats import load_sft_rows, load_tasks
from stillroom.data.inspect import InspectExamples
from stillroom.data.validate import ValidateDataset
from stillroom.errors import DataError, InputError
from stillroom.files import file_sha256
from stillroom.importing.request import ImportRollouts
from stillroom.importing.run import import_rollouts
from stillroom.lineage import Manifest, read_manifest
from stillroom.rollout.rescore.request import ScoreRollouts
from stillroom.settings import Workspace
from stillroom.trace.request import ShowLineage
from stillroom.trace.show import show_lineage
from stillroom.types import RowReason
from stillroom_mcp.next_steps import after_validate_dataset

TRACES = Path(__file__).parents[2] / "fixtures" / "traces"
IN_PLACE = ("nemo_gym", "rnow")
# One of each kind: calls and batches, spans, evaluations, sessions, tables and datasets.
FORMATS = (
    *("litellm", "openai_batch", "otel_genai", "langfuse", "inspect_ai", "codex", "atif"),
    *("csv", "parquet", "sharegpt", "trl_preferences"),
)


def workspace_with(tmp_path: Path, name: str) -> Workspace:
    shutil.copytree(TRACES / name, tmp_path / "logs", ignore=shutil.ignore_patterns("*.seen.json"))
    return Workspace(tmp_path)


def manifest_of(tmp_path: Path, name: str) -> Manifest:
    manifest = read_manifest(tmp_path / name)
    assert manifest is not None
    return manifest


@pytest.mark.parametrize("name", FORMATS)
def test_a_log_is_converted_as_its_import_is(tmp_path: Path, name: str) -> None:
    workspace = workspace_with(tmp_path, name)
    import_rollouts(workspace, ImportRollouts(input="logs", output="imported.jsonl"))
    for source, output in (("imported.jsonl", "expected.jsonl"), ("logs", "train.jsonl")):
        request = ConvertRollouts(input=source, output=output, include_failed=True)
        result = convert_rollouts(workspace, request)

    assert (tmp_path / "train.jsonl").read_bytes() == (tmp_path / "expected.jsonl").read_bytes()
    assert [source.source for source in result.sources] == ["logs"]
    assert len(load_sft_rows(tmp_path / "train.jsonl")) == result.converted > 0
    manifest, imported = (
        manifest_of(tmp_path, "train.jsonl"),
        manifest_of(tmp_path, "imported.jsonl"),
    )
    assert (manifest.inputs, manifest.models) == (imported.inputs, imported.models)
    assert all(file_sha256(Path(one.path)) == one.sha256 for one in manifest.inputs)
    assert not list(tmp_path.glob(".*imported*"))


@pytest.mark.parametrize("name", ["litellm", "verifiers", "sharegpt", "claude_code", "gemini"])
def test_a_log_is_filtered_to_rollouts_of_ours(tmp_path: Path, name: str) -> None:
    workspace = workspace_with(tmp_path, name)
    import_rollouts(workspace, ImportRollouts(input="logs", output="imported.jsonl"))

    kept = filter_dataset(workspace, FilterDataset(input="logs", output="kept.jsonl"))

    assert kept.read == kept.kept > 0
    assert (tmp_path / "kept.jsonl").read_bytes() == (tmp_path / "imported.jsonl").read_bytes()
    assert (
        manifest_of(tmp_path, "kept.jsonl").inputs == manifest_of(tmp_path, "imported.jsonl").inputs
    )
    none = filter_dataset(workspace, FilterDataset(input="logs", output="none.jsonl", min_turns=99))
    assert none.kept == 0
    sources = [
        row["origin"]["source"].partition("#")[0] for row in read_rows(tmp_path / "kept.jsonl")
    ]
    dropped = [DroppedRow(**row) for row in read_rows(tmp_path / "none.jsonl.dropped")]
    assert [f"{workspace.shown(Path(row.file))}:{row.line}" for row in dropped] == sources


def test_a_row_that_repeats_another_one_of_a_log_names_its_place_there(tmp_path: Path) -> None:
    said = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]
    rows = [{"id": name, "conversations": said} for name in "ab"]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    workspace = Workspace(tmp_path)
    import_rollouts(workspace, ImportRollouts(input="chats.jsonl", output="imported.jsonl"))
    num_imported = len(read_rows(tmp_path / "imported.jsonl"))

    request = FilterDataset(input="chats.jsonl", output="kept.jsonl", dedupe="exact")
    result = filter_dataset(workspace, request)

    assert (result.read, result.kept) == (num_imported, 1)
    likes = [row["like"] for row in read_rows(tmp_path / "kept.jsonl.dropped")]
    assert likes == [f"{tmp_path}/chats.jsonl:1"] * (num_imported - 1)


@pytest.mark.parametrize("layout", IN_PLACE)
def test_rows_of_a_known_layout_are_filtered_where_they_are(tmp_path: Path, layout: str) -> None:
    workspace = workspace_with(tmp_path, layout)
    [file] = (path for path in (tmp_path / "logs").iterdir() if path.is_file())
    if layout == "rnow":
        # What the layout writes as one document may be a list of rows, which only an import reads.
        listed = tmp_path / "logs" / "list.json"
        listed.write_text(f"[{file.read_text(encoding='utf-8')}]", encoding="utf-8")
        request = ConvertRollouts(input="logs/list.json", output="list.jsonl", include_failed=True)
        assert convert_rollouts(workspace, request).converted == 1
        listed.unlink()

    filter_dataset(workspace, FilterDataset(input="logs", output="kept.jsonl"))

    [kept] = read_rows(tmp_path / "kept.jsonl")
    assert kept == json.loads(file.read_bytes())


def test_pairs_are_made_of_what_a_log_judged(tmp_path: Path) -> None:
    workspace = workspace_with(tmp_path, "trl_preferences")

    result = make_dpo_pairs(workspace, MakeDpoPairs(input="logs", output="pairs.jsonl"))

    assert result.pairs == len(read_rows(tmp_path / "pairs.jsonl")) > 0
    [record] = manifest_of(tmp_path, "pairs.jsonl").inputs
    assert record.path == str(tmp_path / "logs" / "pairs.jsonl")


@pytest.mark.parametrize("name", ["litellm", "verifiers", "langfuse", "csv"])
def test_a_log_is_validated_as_rollouts(tmp_path: Path, name: str) -> None:
    workspace = workspace_with(tmp_path, name)
    imported = import_rollouts(workspace, ImportRollouts(input="logs", output="imported.jsonl"))

    report = validate_dataset(workspace, ValidateDataset(path="logs", report="none"))

    assert (report.path, report.format) == ("logs", "rollouts")
    assert (report.good, report.bad) == (imported.kept, imported.refused)
    assert report.layouts == {name: count.kept for name, count in imported.formats.items()}
    assert len(report.problems) == imported.refused


def test_rows_of_a_log_are_shown_with_their_places_in_it(tmp_path: Path) -> None:
    workspace = workspace_with(tmp_path, "sharegpt")
    imported = import_rollouts(workspace, ImportRollouts(input="logs", output="imported.jsonl"))
    sources = [row["origin"]["source"] for row in read_rows(tmp_path / "imported.jsonl")]

    page = inspect_examples(workspace, InspectExamples(path="logs", start=1, n=1))

    [example] = page.examples
    assert (page.total_count, example.format) == (imported.kept, "rollouts")
    assert f"logs/{example.where}" == sources[1].partition("#")[0]
    assert example.text.splitlines()[0].startswith(("system: ", "user: "))


def test_a_verdict_on_a_row_of_a_log_drops_that_row(tmp_path: Path) -> None:
    workspace = workspace_with(tmp_path, "sharegpt")
    sampled = sample_for_review(workspace, SampleForReview(input="logs", output="review.jsonl"))
    rows = read_rows(tmp_path / "review.jsonl")
    write_rows(tmp_path / "judged.jsonl", [{**rows[0], "verdict": "drop"}])

    request = FilterDataset(input="logs", output="kept.jsonl", verdicts="judged.jsonl")
    result = filter_dataset(workspace, request)

    assert sampled.read == result.read
    assert result.dropped["dropped in review"] == 1
    dropped = [
        row for row in read_rows(tmp_path / "kept.jsonl.dropped") if row["row"] == rows[0]["id"]
    ]
    assert [f"{workspace.shown(Path(row['file']))}:{row['line']}" for row in dropped] == [
        rows[0]["where"]
    ]


def test_prompts_of_a_log_are_kept_out_of_the_rows(tmp_path: Path) -> None:
    workspace = workspace_with(tmp_path, "sharegpt")
    import_rollouts(workspace, ImportRollouts(input="logs", output="imported.jsonl"))
    rows = read_rows(tmp_path / "imported.jsonl")
    other = [{"role": "user", "content": "Anything else?"}, {"role": "assistant", "content": "No"}]
    write_rows(tmp_path / "rows.jsonl", [rows[0], {**rows[0], "messages": other}])

    request = FilterDataset(input="rows.jsonl", output="kept.jsonl", decontaminate=("logs",))
    assert filter_dataset(workspace, request).kept == 1

    [dropped] = read_rows(tmp_path / "kept.jsonl.dropped")
    place = rows[0]["origin"]["source"].partition("#")[0]
    assert workspace.shown(Path(dropped["like"].rpartition(":")[0])) == place.rpartition(":")[0]
    inputs = [Path(one.path).parent.name for one in manifest_of(tmp_path, "kept.jsonl").inputs]
    assert inputs[1:] == ["logs"] * (len(inputs) - 1)
    assert inputs[1:]


@pytest.mark.parametrize("name", ["sharegpt", "litellm"])
def test_a_row_made_of_a_log_leads_back_to_its_place_in_it(tmp_path: Path, name: str) -> None:
    workspace = workspace_with(tmp_path, name)
    filter_dataset(workspace, FilterDataset(input="logs", output="kept.jsonl"))
    request = ConvertRollouts(input="logs", output="train.jsonl", include_failed=True)
    convert_rollouts(workspace, request)
    first = read_rows(tmp_path / "kept.jsonl")[0]["origin"]["source"]

    for output in ("kept.jsonl", "train.jsonl"):
        lineage = show_lineage(workspace, ShowLineage(path=output, row=1, sources=f"{output}.all"))

        assert [step.kind for step in lineage.row][:2] == ["row", "source row"]
        assert lineage.row[1].at.partition("#")[0] == first.partition("#")[0]
        assert {node.path for node in lineage.root.inputs} >= {
            workspace.shown(path) for path in (tmp_path / "logs").iterdir()
        }
        behind = [row["at"] for row in read_rows(tmp_path / f"{output}.all")]
        assert first in behind


def test_what_holds_no_conversation_is_refused_with_the_imports_reason(tmp_path: Path) -> None:
    workspace = workspace_with(tmp_path, "codex_exec")

    with pytest.raises(DataError, match="lacks the prompts"):
        convert_rollouts(workspace, ConvertRollouts(input="logs", output="train.jsonl"))


def test_a_table_of_texts_and_labels_is_refused_with_the_tools_that_read_it(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("text,label\nmy card is lost,card\n", encoding="utf-8")

    with pytest.raises(DataError) as refused:
        inspect_examples(Workspace(tmp_path), InspectExamples(path="labels.csv"))

    assert "import_rollouts reads conversations" in refused.value.fix
    assert "an input of run_recipe" in refused.value.fix


def test_a_log_is_never_replaced_by_what_is_made_of_it(tmp_path: Path) -> None:
    workspace = workspace_with(tmp_path, "litellm")
    before = (tmp_path / "logs" / "openai.jsonl").read_bytes()

    with pytest.raises(InputError, match="is also an input"):
        convert_rollouts(workspace, ConvertRollouts(input="logs", output="logs/openai.jsonl"))

    assert (tmp_path / "logs" / "openai.jsonl").read_bytes() == before


FAILED = {"success": False, "error": "the server did not answer"}


def test_rollouts_that_rnow_stored_are_read_like_its_other_rollouts(tmp_path: Path) -> None:
    write_stored_rnow(tmp_path / "rollouts" / "r1.txt", RNOW_ROW, RNOW_ROW | {"id": "b"}, FAILED)
    workspace = Workspace(tmp_path)

    for source in ("rollouts", "rollouts/r1.txt"):
        request = ConvertRollouts(input=source, output="train.jsonl", overwrite=True)
        result = convert_rollouts(workspace, request)
        assert (result.read, result.converted) == (3, 2)
    kept = filter_dataset(workspace, FilterDataset(input="rollouts", output="kept.jsonl"))
    assert (kept.read, kept.kept) == (3, 2)
    report = validate_dataset(workspace, ValidateDataset(path="rollouts/r1.txt", report="none"))
    assert (report.format, report.rows, report.good) == ("rollouts", 3, 2)
    [first, *_] = read_rows(tmp_path / "train.jsonl")
    assert first["messages"][-1]["content"] == "7 × 5 = 35"


def test_an_rnow_rollout_that_failed_before_its_first_message_is_a_failure_not_a_bad_row(
    tmp_path: Path,
) -> None:
    failed = FAILED | {"id": "sample_2", "completed": "error", "metadata": {"task_type": "price"}}
    write_rnow(tmp_path / "rollouts", RNOW_ROW, failed)
    workspace = Workspace(tmp_path)

    request = ValidateDataset(path="rollouts", report="none", model="demo/student")
    report = validate_dataset(workspace, request)
    made = import_rollouts(workspace, ImportRollouts(input="rollouts", output="imported.jsonl"))
    converted = convert_rollouts(workspace, ConvertRollouts(input="rollouts", output="train.jsonl"))
    kept = filter_dataset(
        workspace, FilterDataset(input="rollouts", output="kept.jsonl", success=True)
    )
    shown = inspect_examples(workspace, InspectExamples(path="rollouts", n=2))

    assert (report.good, report.bad, report.failed) == (2, 0, 1)
    assert (report.token_rows, report.left_out) == (1, {})
    assert (made.kept, made.refused_by_reason) == (1, {RowReason.FAILED: 1})
    assert (made.formats.keys(), made.unread_files) == ({"rnow"}, [])
    assert (converted.converted, converted.left_out) == (1, {RowReason.FAILED: 1})
    assert kept.kept == 1
    assert [example.problem for example in shown.examples] == [None, None]


def test_wrong_answers_that_passed_a_precondition_are_noted_before_they_are_trained(
    tmp_path: Path,
) -> None:
    # rnow adds a precondition to the sum.
    right = RNOW_ROW | {"total_reward": 2.0, "rewards": {"used_tool": 1.0, "accuracy": 1.0}}
    wrong = RNOW_ROW | {"total_reward": 1.0, "rewards": {"used_tool": 1.0, "accuracy": 0.0}}
    write_rnow(tmp_path / "rollouts", right, wrong)
    write_rnow(tmp_path / "right", right, right)
    write_rnow(tmp_path / "low", RNOW_ROW, RNOW_ROW | {"total_reward": 1.0})
    workspace = Workspace(tmp_path)

    result = convert_rollouts(workspace, ConvertRollouts(input="rollouts", output="train.jsonl"))

    (note,) = [note for note in result.notes if note.startswith("rewards of these rows go from")]
    assert "from 1 to 2, and" in note
    assert "min_reward 2 leaves these out" in note
    write_rnow(tmp_path / "long", right | {"total_reward": 1.99999999}, wrong)
    long = ConvertRollouts(input="long", output="train.jsonl", overwrite=True)
    assert "min_reward 1.99999999 leaves" in " ".join(convert_rollouts(workspace, long).notes)
    for source in ("right", "low"):
        request = ConvertRollouts(input=source, output="train.jsonl", overwrite=True)
        notes = convert_rollouts(workspace, request).notes
        assert not any("rewards of these rows" in note for note in notes)


def test_a_failed_rollout_that_rnow_stored_is_refused_as_a_failure(tmp_path: Path) -> None:
    write_stored_rnow(tmp_path / "r1.txt", RNOW_ROW, FAILED)
    request = ImportRollouts(input="r1.txt", output="imported.jsonl")

    made = import_rollouts(Workspace(tmp_path), request)

    assert made.refused_by_reason == {RowReason.FAILED: 1}
    assert "the server did not answer" in made.problems[0]


def test_a_file_of_a_folder_that_only_an_import_reads_is_named(tmp_path: Path) -> None:
    write_rnow(tmp_path / "rollouts", RNOW_ROW)
    write_stored_rnow(tmp_path / "rollouts" / "r1.txt", RNOW_ROW)
    workspace = Workspace(tmp_path)

    result = convert_rollouts(workspace, ConvertRollouts(input="rollouts", output="train.jsonl"))
    kept = filter_dataset(workspace, FilterDataset(input="rollouts", output="kept.jsonl"))
    report = validate_dataset(workspace, ValidateDataset(path="rollouts", report="none"))

    note = "1 files in rollouts need an import and were not read: r1.txt; "
    assert result.converted == kept.kept == report.good == 1
    for notes in (result.notes[0], kept.problems[0], report.notes[0]):
        assert notes.startswith(note)


def test_a_list_in_a_folder_of_rollouts_is_named_as_one_to_import_not_as_rows_to_fix(
    tmp_path: Path,
) -> None:
    write_rnow(tmp_path / "rollouts", RNOW_ROW)
    (tmp_path / "rollouts" / "all.json").write_text(json.dumps([RNOW_ROW, RNOW_ROW]), "utf-8")
    (tmp_path / "rollouts" / "bill.json").write_text('{"usd": 2}', "utf-8")
    request = ValidateDataset(path="rollouts", report="none")

    report = validate_dataset(Workspace(tmp_path), request)

    assert (report.good, report.bad) == (1, 2)
    assert report.notes[0].startswith("1 files in rollouts need an import and were not read: all.j")
    step = after_validate_dataset(request, report)
    assert step.startswith(
        "import_rollouts reads the files named in notes; else fix the 2 bad rows"
    )
    (tmp_path / "rollouts" / "all.json").unlink()
    report = validate_dataset(Workspace(tmp_path), request)
    assert after_validate_dataset(request, report).startswith("fix the 1 bad rows")


def test_what_must_be_imported_is_refused_for_scores_with_the_command_that_imports_it(
    tmp_path: Path,
) -> None:
    write_stored_rnow(tmp_path / "r1.txt", RNOW_ROW)
    (tmp_path / "rows.json").write_text(json.dumps([RNOW_ROW]), "utf-8")
    write_rows(tmp_path / "own.jsonl", [RNOW_ROW])
    workspace = Workspace(tmp_path)

    for name in ("r1.txt", "rows.json"):
        request = ScoreRollouts(input=name, output="scored.jsonl")
        with pytest.raises(InputError, match=r"must be imported first") as refused:
            score_rollouts(workspace, request)
        assert f"import_rollouts(input={name}" in refused.value.fix
        with pytest.raises(InputError, match=r"must be imported first"):
            check_needs_no_import(workspace, name)
    check_needs_no_import(workspace, "own.jsonl")
    with pytest.raises(DataError, match="rnow stored"):
        load_tasks(tmp_path / "r1.txt")


def test_a_rollout_that_nothing_judged_is_never_a_success_because_it_ran(tmp_path: Path) -> None:
    unjudged = RNOW_ROW | {"id": "b", "total_reward": None, "rewards": {}}
    cut = unjudged | {"id": "c", "completed": False}
    cut_but_judged = RNOW_ROW | {"id": "d", "completed": False}
    write_rnow(tmp_path / "rollouts", RNOW_ROW, unjudged, cut, cut_but_judged)
    workspace = Workspace(tmp_path)
    made = import_rollouts(workspace, ImportRollouts(input="rollouts", output="imported.jsonl"))
    rows = read_rows(tmp_path / "imported.jsonl")
    assert [(row["reward"], row["success"]) for row in rows] == [
        (0.75, True),
        (None, None),
        (0.0, False),
        (0.75, True),
    ]
    assert made.rewarded == 3
    assert any(note.endswith("score these with score_rollouts") for note in made.notes)
    assert made.losses["not completed"] == 2
    assert any("2 rollouts end with an answer although" in note for note in made.notes)
    for source in ("rollouts", "imported.jsonl"):
        request = ConvertRollouts(input=source, output="train.jsonl", overwrite=True)
        converted = convert_rollouts(workspace, request)
        assert converted.converted == 3
        (note,) = [note for note in converted.notes if "no reward or success" in note]
        assert note.startswith("1 of 3 rows")
