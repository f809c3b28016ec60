import pytest

from stillroom.data.formats import Task
from stillroom.data.instruction import UNCHANGED, Instruction, PromptViews, read_context
from stillroom.errors import ConfigError, InputError
from stillroom.settings import Workspace

ASK = {"role": "user", "content": "How much?"}
OWN = {"role": "system", "content": "You are a clerk."}


def system(text):
    return {"role": "system", "content": text}


@pytest.mark.parametrize(
    ("instruction", "with_own", "without"),
    [
        (Instruction(), [OWN, ASK], [ASK]),
        (Instruction("Add 7."), [system("Add 7."), ASK], [system("Add 7."), ASK]),
        (Instruction(""), [ASK], [ASK]),
        (
            Instruction(context="The rules."),
            [system("You are a clerk.\n\nThe rules."), ASK],
            [system("The rules."), ASK],
        ),
        (Instruction("Add 7.", "The rules."), *[[system("Add 7.\n\nThe rules."), ASK]] * 2),
        (Instruction("", "The rules."), *[[system("The rules."), ASK]] * 2),
    ],
)
def test_a_system_message_replaces_the_rows_own_and_a_context_follows_it(
    instruction, with_own, without
):
    assert instruction.apply_to([OWN, ASK]) == with_own
    assert instruction.apply_to([ASK]) == without


def test_a_task_keeps_its_id_and_the_messages_that_others_read():
    task = Task(
        task_id="t",
        messages=[OWN, ASK],
        metadata={},
        tool_names=None,
        reward_names=None,
        variables={},
    )
    views = PromptViews(student=Instruction(""))

    assert views.for_student(task).messages == [ASK]
    assert views.for_student(task).task_id == "t"
    assert task.messages == [OWN, ASK]
    assert not views.are_equal
    assert UNCHANGED.for_student(task) is task


def test_a_context_is_read_as_it_is_but_for_its_ends(tmp_path):
    (tmp_path / "SKILL.md").write_text("\n# Rules\n\nAdd 7 € to each price.\n", encoding="utf-8")

    text = read_context(Workspace(tmp_path), "SKILL.md", label="teacher.context_file")

    assert text == "# Rules\n\nAdd 7 € to each price."


@pytest.mark.parametrize(
    ("name", "content", "error", "problem"),
    [
        ("gone.md", None, InputError, "does not exist"),
        (".env", b"KEY=1", InputError, "usually contain keys or passwords"),
        ("empty.md", b" \n", ConfigError, "is empty"),
        ("bytes.md", b"\xff\xfe\x00", ConfigError, "is not UTF-8 text"),
        (
            "large.md",
            b"x" * ((4 << 20) + 1),
            ConfigError,
            "has 4 MB, more than any model's context",
        ),
    ],
)
def test_a_file_that_no_model_can_read_is_refused(tmp_path, name, content, error, problem):
    if content is not None:
        (tmp_path / name).write_bytes(content)

    with pytest.raises(error, match=problem):
        read_context(Workspace(tmp_path), name, label="teacher.context_file")


def test_a_folder_is_no_context(tmp_path):
    with pytest.raises(ConfigError, match="is not a file"):
        read_context(Workspace(tmp_path), tmp_path, label="teacher.context_file")
