import json

import pytest

from stillroom.data.formats import task_from_row
from stillroom.importing.request import ImportRollouts
from stillroom.importing.run import import_rollouts
from stillroom.settings import Workspace


def row(question, answer, **fields):
    message = {"role": "assistant", "content": answer}
    response = {"model": "m-1", "choices": [{"message": message, "finish_reason": "stop"}]}
    request = {"messages": [{"role": "user", "content": question}]}
    return {"request": request, "response": response, **fields}


def imported(folder, rows, **options):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    request = ImportRollouts(input="rows.jsonl", output="out.jsonl", **{"prompts": True, **options})
    made = import_rollouts(Workspace(folder), request)
    assert made.read == made.kept + made.merged + made.refused
    return made


def lines(folder, name="out.prompts.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text("utf-8").splitlines()]


def expected(folder, name="out.prompts.jsonl"):
    prompts = lines(folder, name)
    return {p["messages"][-1]["content"]: p["metadata"].get("expected_answer") for p in prompts}


def told(made):
    return [
        note for note in made.notes if "different answers, none of them known to be wrong" in note
    ]


@pytest.mark.parametrize(
    ("answers", "claimed"),
    [
        (["42", "42."], "42"),
        (["42.", "It is 42.", "42"], "42"),
        (["It is 42.", "42"], "42"),
        (["42", "43"], None),
        (["42", "43", "42!"], None),
        (["A red one", "a  red ONE"], "A red one"),
        (["<think>43? No.</think>42", "It is 42"], "42"),
        (['<tool_call>{"name": "count", "arguments": {"of": "42', "42"], "42"),
        (["x" * 20_000, "42"], None),
        (["x" * 20_000 + " 42", "42"], "42"),
        (['{"a": "Rome", "b": 2}', '{"b": 2, "a": "Rome"}'], {"a": "Rome", "b": 2}),
        (['{"a": "Rome", "b": 2}', '{"a": "Rome", "b": 3}'], None),
        (['{"a": ["Rome"]}', '{"a":["Rome"]}'], None),
    ],
)
def test_a_prompt_has_an_expected_answer_only_if_all_right_answers_agree(
    tmp_path, answers, claimed
):
    made = imported(tmp_path, [row("How many?", text) for text in answers])
    assert made.kept == len(answers)
    assert expected(tmp_path) == {"How many?": claimed}
    assert len(told(made)) == (claimed is None)
    assert all("set reward_from" in note for note in told(made))


def test_the_answers_with_the_best_reward_are_the_ones_that_are_expected(tmp_path):
    rows = [
        row("Sum?", "3", scores={"ok": 0}),
        row("Sum?", "4", scores={"ok": 0.6}),
        row("Sum?", "9"),
        row("Sum?", "5", scores={"ok": 1}),
        row("Sum?", "It is 5", scores={"ok": 1}),
        row("Both?", "a", scores={"ok": 1}),
        row("Both?", "b", scores={"ok": 1}),
        row("None?", "c", scores={"ok": 0}),
    ]
    made = imported(tmp_path, rows, reward_from=("ok",))
    assert expected(tmp_path) == {"Sum?": "5", "Both?": None, "None?": None}
    (note,) = told(made)
    assert note.startswith("1 prompts ")
    assert "set reward_from" not in note
    assert any(note.startswith("1 prompts have no expected_answer") for note in made.notes)


def test_prompts_with_contradictory_answers_are_counted_without_a_file_of_prompts_too(tmp_path):
    rows = [row("Urgent?", "yes"), row("Urgent?", "no"), row("Paid?", "no"), row("Paid?", "No.")]
    (note,) = told(imported(tmp_path, rows, prompts=False))
    assert note.startswith("1 prompts have different answers")
    assert "dedupe of filter_dataset drops only rows with equal answers" in note
    assert "expected_answer" not in note


def test_an_answer_that_the_source_expects_stays_and_says_how_to_match(tmp_path):
    rows = [
        {"question": "Ours?", "answer": "no", "expected_answer": "yes"},
        {"question": "Ours?", "answer": "never"},
        {"question": "Number?", "answer": "It costs 1,000", "answer_match": "numeric"},
        {"question": "Number?", "answer": "1000.0 in all"},
    ]
    made = imported(tmp_path, rows)
    assert expected(tmp_path) == {"Ours?": "yes", "Number?": "It costs 1,000"}
    assert told(made) == []


def test_rollouts_have_the_ids_of_the_prompts_as_they_are_written(tmp_path):
    rows = [row(q, a) for q, a in [("A", "1"), ("B", "1"), ("A", "2"), ("C", "1"), ("A", "3")]]
    imported(tmp_path, rows)
    ids = [task_from_row(prompt).task_id for prompt in lines(tmp_path)]
    rollouts = lines(tmp_path, "out.jsonl")
    assert [r["messages"][0]["content"] for r in rollouts] == ["A", "B", "A", "C", "A"]
    assert [r["task_id"] for r in rollouts] == [ids[0], ids[1], ids[0], ids[2], ids[0]]
    assert [r["sample"] for r in rollouts] == [0, 0, 1, 0, 2]


def test_held_out_prompts_have_expected_answers_by_the_same_rule(tmp_path):
    rows = [
        row(f"Which city lies at {n}?", a, timestamp=1_760_000_000 + 100 * n)
        for n in range(10)
        for a in ("Rome", "Oslo" if n % 2 else "Rome.")
    ]
    made = imported(tmp_path, rows, split_heldout=0.4)
    assert made.heldout is not None
    aside = expected(tmp_path, "out.heldout.prompts.jsonl")
    found = aside | expected(tmp_path)
    assert len(aside) == 4
    assert set(found.values()) == {None, "Rome"}
    assert all((answer is None) == (int(q[-2]) % 2 == 1) for q, answer in found.items())
    assert told(made)[0].startswith("5 prompts ")
    ids = {task_from_row(p).task_id for p in lines(tmp_path, "out.heldout.prompts.jsonl")}
    assert {r["task_id"] for r in lines(tmp_path, "out.heldout.jsonl")} == ids
