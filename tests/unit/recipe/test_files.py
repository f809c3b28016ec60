import json
import os
import runpy
from pathlib import Path

from fakes.rollout_rows import rollout_row
from stillroom.curate.filter.contamination import ContaminationIndex
from stillroom.data.formats import load_tasks
from stillroom.lineage import read_manifest
from stillroom.recipe.answers import LabelAnswers, ObjectAnswers, form_of
from stillroom.recipe.files import RecipeFiles, is_up_to_date
from stillroom.recipe.inputs import RecipePrompt
from stillroom.recipe.request import RunRecipe
from stillroom.recipe.selection import read_answers

REQUEST = RunRecipe(input="in.csv", teacher="big", student="small")


def example(text: str, answer: str) -> RecipePrompt:
    row = {
        "messages": [{"role": "user", "content": text}],
        "metadata": {"expected_answer": answer, "id": 7},
    }
    return RecipePrompt(row, text, answer)


def untouched_after(path: Path, write: object) -> bool:
    """Whether a file that is written again has the same bytes and time."""
    os.utime(path, (1, 1))
    before = path.read_bytes()
    assert callable(write)
    write()
    return path.read_bytes() == before and path.stat().st_mtime == 1


def test_a_file_with_the_same_content_is_not_written_again(tmp_path: Path) -> None:
    files, examples = RecipeFiles(tmp_path), [example("One?", "1")]

    path = files.write_prompts("test", examples)

    assert json.loads(path.read_text())["metadata"] == {"expected_answer": "1", "id": 7}
    assert untouched_after(path, lambda: files.write_prompts("test", examples))


def test_prompts_to_ask_are_in_one_file_each(tmp_path: Path) -> None:
    files, prompts = RecipeFiles(tmp_path), [example(f"{n}?", "1") for n in range(4)]

    [first] = files.prompts_to_ask("teacher", prompts[:2])

    assert files.prompts_to_ask("teacher", prompts[1::-1]) == [first]
    assert files.prompts_to_ask("again", prompts[:1]) != [first]
    both = files.prompts_to_ask("teacher", prompts)
    assert both[0] == first
    assert [task.task_id for task in load_tasks(both[1])] == [one.task_id for one in prompts[2:]]


def test_a_configuration_stays_as_it_was_for_the_same_inputs(tmp_path: Path) -> None:
    files = RecipeFiles(tmp_path)

    place = files.config_path("sft", {"rows": "a"})
    first = files.write_config(place, lambda: "minutes: 5\n")
    same = files.write_config(place, lambda: "minutes: 4\n")
    other = files.write_config(files.config_path("sft", {"rows": "b"}), lambda: "minutes: 4\n")

    assert (same, same.read_text()) == (first, "minutes: 5\n")
    assert other != first


def test_chosen_rollouts_have_a_manifest_and_are_written_once(tmp_path: Path) -> None:
    source = tmp_path / "teacher.jsonl"
    source.write_text("".join(json.dumps(rollout_row(task_id=name)) + "\n" for name in "abc"))
    files = RecipeFiles(tmp_path)
    lines = [
        one.line
        for one in read_answers(
            [source], None, task_ids="abc", evaluation=ContaminationIndex.of_texts({})
        ).usable
    ]

    path = files.write_recorded("chosen", lines[1:], REQUEST, [source])

    assert [json.loads(line)["task_id"] for line in path.read_text().splitlines()] == ["b", "c"]
    manifest = read_manifest(path)
    assert manifest is not None
    assert [Path(record.path).name for record in manifest.inputs] == ["teacher.jsonl"]
    assert is_up_to_date(path, REQUEST)
    assert untouched_after(
        path, lambda: files.write_recorded("chosen", lines[1:], REQUEST, [source])
    )
    source.write_text("changed")
    assert not is_up_to_date(path, REQUEST)


def test_the_tool_that_reduces_answers_names_one_or_none(tmp_path: Path) -> None:
    path = RecipeFiles(tmp_path).write_answers_tool(LabelAnswers(("a 'b'", "c")))

    rewrite = runpy.run_path(str(path))["rewrite"]

    assert rewrite("I say: C.") == "c"
    assert rewrite("either a 'b' or c") == ""


def test_the_tool_that_reduces_answers_finds_the_object_in_a_text(tmp_path: Path) -> None:
    form = form_of([(f"of {n}?", f'{{"kind": "{"ab"[n % 2]}", "n": "{n}"}}') for n in range(20)])
    assert isinstance(form, ObjectAnswers)
    path = RecipeFiles(tmp_path).write_answers_tool(form)

    rewrite = runpy.run_path(str(path))["rewrite"]

    assert rewrite('Here:\n```json\n{"n": 5,\n "kind": "A"}\n```') == '{"kind": "a", "n": "5"}'
    assert rewrite("none") == ""
