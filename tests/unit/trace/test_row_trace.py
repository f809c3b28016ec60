import pytest

from fakes.lineages import NUM_PROMPTS, RUN, Lineages
from fakes.rollout_rows import assistant, rollout_row, user, write_rows
from stillroom.errors import InputError
from stillroom.recipe.files import RecipeFiles
from stillroom.recipe.request import RunRecipe
from stillroom.trace.request import RowStep, ShowLineage
from stillroom.trace.show import show_lineage


def steps(project: Lineages, path: str, row: int | str) -> list[RowStep]:
    return show_lineage(project.workspace, ShowLineage(path=path, row=row)).row


def ways(found: list[RowStep]) -> list[tuple[str, str]]:
    return [(step.kind, step.at) for step in found]


@pytest.mark.parametrize("path", ["sft.jsonl", RUN])
@pytest.mark.parametrize("number", range(1, NUM_PROMPTS + 1))
def test_a_trained_row_leads_back_to_its_prompt(project: Lineages, path: str, number: int) -> None:
    rollout = 2 * number - 1
    way = [
        ("row", f"sft.jsonl:{number}"),
        ("rollout", f"good.jsonl:{number}"),
        ("row", f"rollouts.jsonl:{rollout}"),
        ("prompt", f"prompts.jsonl:{number}"),
    ]
    for row in (number, str(number), project.ids[rollout - 1]):
        found = steps(project, path, row)
        assert ways(found) == way
        assert [step.decision for step in found] == [
            "converted",
            "kept by filter_dataset",
            None,
            None,
        ]
        assert {str(step.state) for step in found} == {"same"}


def test_a_dropped_rollout_says_why_and_where_it_is(project: Lineages) -> None:
    found = steps(project, RUN, project.ids[3])
    assert ways(found) == [
        ("row", "good.jsonl.dropped:2"),
        ("row", "rollouts.jsonl:4"),
        ("prompt", "prompts.jsonl:2"),
    ]
    assert found[0].decision == "dropped by filter_dataset"
    assert found[0].reasons == ["reward below 1"]


def test_a_row_of_several_filtered_files_leads_back_to_its_own(project: Lineages) -> None:
    project.rollouts("others.jsonl", model="other")
    project.filter(("rollouts.jsonl", "others.jsonl"), "both.jsonl", success=False)
    kept, dropped = steps(project, "both.jsonl", 6), steps(project, "both.jsonl", project.ids[0])
    assert ways(kept)[1] == ("row", "others.jsonl:4")
    assert (dropped[0].reasons, ways(dropped)[1]) == (["a success"], ("row", "rollouts.jsonl:1"))


def test_rows_of_a_recipe_lead_back_to_the_teachers_rollouts(project: Lineages) -> None:
    files, request = RecipeFiles(project.root), RunRecipe(input="prompts.jsonl", student="s")
    source = project.root / "rollouts.jsonl"
    lines = source.read_bytes().splitlines()[::2]
    files.write_recorded("chosen-1", lines, request, [source])
    project.convert("chosen-1.jsonl", "sft-1.jsonl")
    reworded: dict[str, object] = {
        "messages": [user("Add one to 2."), assistant("3")],
        "metadata": {"reworded_from": project.ids[4], "reworded_by": "r1"},
    }
    rewordings = [rollout_row(id=name) for name in ("r1", "r2")]
    write_rows(project.root / "rewordings.jsonl", rewordings)
    base = project.root / "sft-1.jsonl"
    files.write_extended(
        "sft-reworded", base, [reworded], request, [project.root / "rewordings.jsonl"]
    )
    way = [
        ("row", "sft-1.jsonl:3"),
        ("rollout", "chosen-1.jsonl:3"),
        ("row", "rollouts.jsonl:5"),
        ("prompt", "prompts.jsonl:3"),
    ]

    for number in (3, NUM_PROMPTS + 1):
        found = steps(project, "sft-reworded.jsonl", number)
        assert ways(found) == [("row", f"sft-reworded.jsonl:{number}"), *way]
    for file, name in (("chosen-1.jsonl", project.ids[1]), ("sft-reworded.jsonl", "r2")):
        assert steps(project, file, name)[0].decision == "left out by run_recipe"
    last = ("row", f"sft-reworded.jsonl:{NUM_PROMPTS + 1}")
    assert ways(steps(project, "sft-reworded.jsonl", "r1")) == [last, *way]


def test_a_rollout_that_was_not_converted_says_why(project: Lineages) -> None:
    project.convert("rollouts.jsonl", "direct.jsonl")
    found = steps(project, "direct.jsonl", project.ids[1])
    assert found[0].decision == "left out by convert_rollouts"
    assert found[0].reasons == ["no success"]
    assert ways(found)[1:] == [("row", "rollouts.jsonl:2"), ("prompt", "prompts.jsonl:1")]


REWRITE = '''
from stillroom.tools import tool

@tool
def rewrite(answer: str) -> str | None:
    """Leaves out wrong answers of the model."""
    return None if "says no" in answer else answer
'''


def test_a_failed_rollout_that_was_left_out_for_another_reason_is_not_called_a_failure(
    project: Lineages,
) -> None:
    (project.root / "rewrite.py").write_text(REWRITE, encoding="utf-8")
    project.convert("rollouts.jsonl", "all.jsonl", include_failed=True, rewrite="rewrite.py")
    found = steps(project, "all.jsonl", project.ids[1])
    assert (found[0].decision, found[0].reasons) == ("left out by convert_rollouts", [])


def test_a_pair_leads_back_to_both_rollouts(project: Lineages) -> None:
    project.pairs()
    found = steps(project, "pairs.jsonl", 2)
    assert ways(found) == [
        ("row", "pairs.jsonl:2"),
        ("chosen rollout", "rollouts.jsonl:3"),
        ("prompt", "prompts.jsonl:2"),
        ("rejected rollout", "rollouts.jsonl:4"),
        ("prompt", "prompts.jsonl:2"),
    ]


def test_rows_that_are_the_same_are_all_told(project: Lineages) -> None:
    rows = project.rows("rollouts.jsonl")
    write_rows(project.root / "twice.jsonl", [rows[0], rows[0]])
    project.convert("twice.jsonl", "two.jsonl")
    found = steps(project, "two.jsonl", 2)
    assert found[1].at == "twice.jsonl:1"
    assert found[1].also_at == ["twice.jsonl:2"]


def test_a_row_that_is_not_there_any_more_is_told_not_guessed(project: Lineages) -> None:
    rows = project.rows("good.jsonl")
    rows[0]["messages"][1]["content"] = "another answer"
    write_rows(project.root / "good.jsonl", rows)
    found = steps(project, "sft.jsonl", 1)
    assert [(s.at, s.decision) for s in found[1:]] == [
        ("good.jsonl", "the file does not have the row any more")
    ]
    assert found[1].state == "changed"


def test_a_row_of_a_changed_training_file_is_not_taken_for_the_one_that_was_used(
    project: Lineages,
) -> None:
    rows = project.rows("sft.jsonl")
    write_rows(project.root / "sft.jsonl", rows[1:])
    found = steps(project, RUN, 1)
    assert found[0].at == "sft.jsonl:1"
    assert found[0].state == "changed"
    assert found[0].decision is not None
    assert "may not be the row" in found[0].decision


def test_the_kept_version_of_a_training_file_is_looked_at_where_the_file_has_changed(
    project: Lineages,
) -> None:
    show_lineage(project.workspace, ShowLineage(path="sft.jsonl", tag="v1"))
    write_rows(project.root / "sft.jsonl", project.rows("sft.jsonl")[1:])
    found = steps(project, RUN, 1)
    assert found[0].at.startswith(".stillroom/datasets/")
    assert ways(found)[-1] == ("prompt", "prompts.jsonl:1")


def test_an_id_that_several_rows_have_is_refused_with_their_names(project: Lineages) -> None:
    rows = [{**row, "id": "None-None"} for row in project.rows("rollouts.jsonl")]
    write_rows(project.root / "same.jsonl", [*rows, rows[1]])
    project.filter("same.jsonl", "same_good.jsonl", min_reward=1)

    with pytest.raises(InputError, match=r"9 rows have the id 'None-None'.*#1 \(same.jsonl:1\)"):
        steps(project, "same.jsonl", "None-None")
    with pytest.raises(InputError, match="4 rows have the id 'None-None'"):
        steps(project, "same_good.jsonl", "None-None")
    names = [line["row"] for line in project.rows("same_good.jsonl.dropped")]
    assert names[-1] == names[0].replace("#1", "#2")
    found = steps(project, "same_good.jsonl", names[-1])
    assert ways(found) == [("row", "same_good.jsonl.dropped:5"), ("row", "same.jsonl:9")]
    assert found[1].row == names[-1]
    with pytest.raises(InputError, match="2 rows have the id"):
        steps(project, "same.jsonl", names[0][:9])


def test_a_rows_name_is_followed_to_what_was_made_of_it(project: Lineages) -> None:
    project.pairs()
    (name,) = {step.row for step in steps(project, "rollouts.jsonl", 3)[:1]}
    assert name is not None

    assert ways(steps(project, "sft.jsonl", name))[0] == ("row", "sft.jsonl:2")
    assert ways(steps(project, "pairs.jsonl", name))[0] == ("row", "pairs.jsonl:2")
    assert ways(steps(project, "pairs.jsonl", name[:8]))[0] == ("row", "pairs.jsonl:2")


def test_a_row_is_followed_from_an_export(project: Lineages) -> None:
    project.export()
    way = ways(steps(project, RUN, 2))

    assert ways(steps(project, "exported", 2)) == way
    assert way[-1] == ("prompt", "prompts.jsonl:2")
    assert ways(steps(project, "exported", project.ids[3]))[0][1] == "good.jsonl.dropped:2"


def test_a_missing_file_ends_the_way(project: Lineages) -> None:
    (project.root / "good.jsonl").unlink()
    found = steps(project, "sft.jsonl", 1)
    assert found[-1].decision == "the file is missing"


@pytest.mark.parametrize(
    ("row", "expected"), [(99, "no row at line 99"), ("x-9", "nor its inputs have a row 'x-9'")]
)
def test_a_row_that_never_was_there_is_refused(
    project: Lineages, row: int | str, expected: str
) -> None:
    with pytest.raises(InputError, match=expected):
        steps(project, RUN, row)


def test_a_row_without_its_teachers_instruction_leads_back_to_the_rollout(
    project: Lineages,
) -> None:
    project.convert(output="instructed.jsonl", system="Be short.")

    found = steps(project, "instructed.jsonl", 2)

    assert ways(found)[:2] == [("row", "instructed.jsonl:2"), ("rollout", "good.jsonl:2")]
    assert ways(found)[-1] == ("prompt", "prompts.jsonl:2")
