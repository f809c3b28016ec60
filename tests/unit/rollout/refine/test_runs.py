"""Whole runs that refine a student's rollouts, against a scripted teacher."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from fakes.base_models import save_base
from fakes.chat_endpoint import completion
from fakes.rollout_rows import (
    TEACHER,
    assistant,
    read_rows,
    rollout_row,
    tool_call,
    tool_reply,
    user,
    write_rows,
)
from fakes.rollout_runs import PowerCutError, run_rollouts
from fakes.tiny_models import TinyModels
from fakes.user_files import write_tools
from stillroom.curate.convert import ConvertRollouts, convert_rollouts
from stillroom.data.formats import load_tasks
from stillroom.errors import DataError, InputError
from stillroom.lineage import read_manifest
from stillroom.rollout.forecast import Forecast
from stillroom.rollout.plan import with_system
from stillroom.rollout.request import GenerateRollouts, Takeover
from stillroom.settings import Workspace

LAMP, CHAIR = '{"item": "lamp"}', '{"item": "chair"}'
PRICES = """
    @tool
    def price(item: str) -> str:
        "Returns the price of an item."
        return "12" if item == "lamp" else "7"
"""


class Teacher:
    """Asks for the lamp's price and says it; as a critic it names the turns of `verdicts`."""

    def __init__(self, *verdicts: str, lasts: int = 1000) -> None:
        self.verdicts, self.lasts = list(verdicts), lasts
        self.served: list[str] = []
        self.bodies: list[dict[str, Any]] = []

    async def handle(self, request: httpx.Request) -> httpx.Response:
        if len(self.served) == self.lasts:
            raise PowerCutError
        body = json.loads(request.content)
        self.bodies.append(body)
        messages = body["messages"]
        if "wrong first?" in str(messages):
            self.served.append("critic")
            return completion(
                self.verdicts[min(self.served.count("critic"), len(self.verdicts)) - 1]
            )
        if messages[-1]["role"] == "tool":
            self.served.append("answer")
            return completion(f"It costs {messages[-1]['content']}.")
        self.served.append("call")
        call = tool_call(call_id="t0", arguments=LAMP)
        return completion(None, tool_calls=[call], finish_reason="tool_calls")


def student_row(
    task_id: str, sample: int, *, looks_up: str, says: str, replied: str
) -> dict[str, Any]:
    is_right = "12" in says
    return rollout_row(
        task_id=task_id,
        sample=sample,
        messages=[
            user("prompt"),
            assistant(None, tool_call(arguments=looks_up)),
            tool_reply(replied),
            assistant(says),
        ],
        turns=2,
        reward=float(is_right),
        success=is_right,
    )


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """Four prompts; the student looks up the wrong item (1), misreads it (2) and is right (3)."""
    prompts = [{"prompt": f"{n}: the lamp?", "metadata": {"expected_answer": 12}} for n in range(4)]
    write_rows(tmp_path / "prompts.jsonl", prompts)
    write_tools(tmp_path, PRICES)
    ids = [task.task_id for task in load_tasks(tmp_path / "prompts.jsonl")]
    write_rows(
        tmp_path / "student.jsonl",
        [
            student_row(ids[1], 0, looks_up=CHAIR, says="It costs 7.", replied="7"),
            student_row(ids[2], 1, looks_up=LAMP, says="It costs 9.", replied="12"),
            student_row(ids[3], 0, looks_up=LAMP, says="It costs 12.", replied="12"),
        ],
    )
    return Workspace(tmp_path)


def run_of(workspace: Workspace, teacher: Teacher, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "output": "refined.jsonl",
        "tools": "tools.py",
        "max_concurrency": 1,
        "refine": "student.jsonl",
    }
    return run_rollouts(workspace, teacher.handle, **{**given, **changes})


def rows_of(workspace: Workspace) -> list[dict[str, Any]]:
    rows = read_rows(workspace.root / "refined.jsonl")
    return sorted(rows, key=lambda row: row["messages"][0]["content"])


def test_hard_prompts_are_those_that_the_student_failed_with_their_own_ids(
    workspace: Workspace,
) -> None:
    teacher = Teacher()

    result = run_of(workspace, teacher, takeover="start")

    tasks = load_tasks(workspace.root / "prompts.jsonl")
    assert [row["task_id"] for row in rows_of(workspace)] == [task.task_id for task in tasks[1:3]]
    assert (result.requested, result.num_success, result.taken_over) == (2, 2, None)
    assert {row["refined"] for row in rows_of(workspace)} == {None}
    assert len(run_of(workspace, Teacher(), takeover="start", output="one.jsonl", n=1).output) > 0
    assert len(read_rows(workspace.root / "one.jsonl")) == 1
    inputs = read_manifest(workspace.root / "refined.jsonl").inputs  # type: ignore[union-attr]
    assert "student.jsonl" in [Path(record.path).name for record in inputs]


@pytest.mark.parametrize("student_read_it", [True, False])
def test_a_teacher_with_a_system_message_of_its_own_answers_the_prompts_that_the_student_failed(
    workspace: Workspace, student_read_it: bool
) -> None:
    tasks = load_tasks(workspace.root / "prompts.jsonl")
    if student_read_it:
        tasks = [with_system(task, "Be brief.") for task in tasks]
        rows = read_rows(workspace.root / "student.jsonl")
        moved = [row | {"task_id": tasks[n].task_id} for n, row in enumerate(rows, start=1)]
        write_rows(workspace.root / "student.jsonl", moved)
    teacher = Teacher()

    result = run_of(workspace, teacher, takeover="start", system="Be brief.")

    assert {row["task_id"] for row in rows_of(workspace)} == {t.task_id for t in tasks[1:3]}
    assert {body["messages"][0]["content"] for body in teacher.bodies} == {"Be brief."}
    assert (result.requested, result.num_success) == (2, 2)
    # The rows stand under the same ids when they are read again.
    assert run_of(workspace, Teacher(), takeover="start", system="Be brief.").calls == 0


def test_the_teacher_takes_over_where_it_acts_otherwise_and_who_wrote_what_is_on_record(
    workspace: Workspace,
) -> None:
    teacher = Teacher()

    # `takeover: first_difference` is the default.
    result = run_of(workspace, teacher, train_turns="teacher")

    first, second = rows_of(workspace)
    # The wrong look-up is the teacher's at once; where the first turn agrees it is asked beside.
    assert first["refined"]["authors"] == ["teacher", "teacher"]
    assert first["refined"]["unused"] is None
    assert second["refined"]["authors"] == ["student", "teacher"]
    assert second["refined"]["turn"] == 1
    assert second["refined"]["rollout"] == f"{second['task_id']}-1"
    assert second["sample"] == 1
    assert second["refined"]["unused"]["calls"] == 1
    assert second["usage"] == {"prompt_tokens": 10, "completion_tokens": 5}
    assert second["dropped"]["usage"] == {"prompt_tokens": 10, "completion_tokens": 5}
    assert [m.get("weight") for m in second["messages"]] == [None, 0, None, None]
    assert result.calls == len(teacher.served) == 4
    assert result.usage.completion_tokens == 20
    assert (result.requested, result.num_success) == (2, 2)
    # Neither what is trained nor another author's marks are sent to the endpoint.
    sent = [message for body in teacher.bodies for message in body["messages"]]
    assert not any("weight" in message for message in sent)
    convert_rollouts(workspace, ConvertRollouts(input="refined.jsonl", output="sft.jsonl"))
    assert {row["task_id"] for row in read_rows(workspace.root / "sft.jsonl")} == {
        first["task_id"],
        second["task_id"],
    }


def test_a_critic_says_in_text_where_the_teacher_takes_over(workspace: Workspace) -> None:
    teacher = Teacher('{"turn": 1}', '{"turn": 2}')

    result = run_of(workspace, teacher, takeover="critic")

    first, second = rows_of(workspace)
    assert [row["refined"]["turn"] for row in (first, second)] == [0, 1]
    assert first["refined"]["critic"]["calls"] == 1
    assert [m.get("weight") for m in second["messages"]] == [None] * 4
    assert (result.num_success, result.taken_over, result.critic.calls) == (2, 2, 2)
    assert teacher.served == ["critic", "call", "answer", "critic", "answer"]
    question = teacher.bodies[0]["messages"]
    assert "from 1 to 2" in question[0]["content"]
    for shown in ("1: the lamp?", "[assistant calls price]", CHAIR, "[tool] 7", "It costs 7."):
        assert shown in question[1]["content"]


def test_another_model_criticises_if_critic_yml_names_one(workspace: Workspace) -> None:
    critic = "model: small\nbase_url: http://critic.test/v1\nmax_tokens: 8\n"
    (workspace.root / "critic.yml").write_text(critic)
    teacher = Teacher("1", "2")

    result = run_of(workspace, teacher, takeover="critic", critic="critic.yml")

    assert [row["refined"]["turn"] for row in rows_of(workspace)] == [0, 1]
    assert (result.critic.calls, result.num_success) == (2, 2)
    asked = [(body["model"], body["max_tokens"]) for body in teacher.bodies]
    assert [model for model, _ in asked] == ["small", "m", "m", "small", "m"]
    assert {most for model, most in asked if model == "small"} == {8}
    manifest = read_manifest(workspace.root / "refined.jsonl")
    assert manifest is not None
    assert [m.name for m in manifest.models if m.role == "critic"] == ["small"]


def test_a_critic_in_this_process_is_asked_and_its_calls_are_counted(workspace: Workspace) -> None:
    (workspace.root / "critic.yml").write_text("{model: teacher, provider: demo, max_tokens: 8}")
    teacher = Teacher()

    # The demo's clerk cannot criticise: it names no turn in two tries.
    result = run_of(workspace, teacher, takeover="critic", critic="critic.yml", n=1)

    [row] = rows_of(workspace)
    assert (row["refined"]["turn"], row["refined"]["critic"]["calls"]) == (None, 2)
    assert (result.critic.calls, result.taken_over, teacher.served) == (2, 0, [])


def test_a_critic_that_names_no_turn_is_asked_once_more_and_then_nothing_is_taken_over(
    workspace: Workspace,
) -> None:
    teacher = Teacher('{"turn": 3}')

    result = run_of(workspace, teacher, takeover="critic")

    first, second = rows_of(workspace)
    assert first["refined"]["turn"] is None
    assert first["refined"]["critic"]["calls"] == 2
    assert first["usage"]["completion_tokens"] == 0
    assert (first["success"], second["success"]) == (False, False)
    assert teacher.served == ["critic"] * 4
    assert (result.calls, result.num_success, result.taken_over) == (4, 0, 0)


def test_a_rollout_whose_tools_reply_otherwise_now_is_refused_and_counted(
    workspace: Workspace,
) -> None:
    write_tools(workspace.root, PRICES.replace('"12"', '"13"'))

    result = run_of(workspace, Teacher('{"turn": 2}'), takeover="critic")

    assert result.failed_by_class == {"replay": 1}
    [failure] = read_rows(workspace.runs / "run" / "failures.jsonl")
    assert failure["class"] == "replay"
    assert "replied '12' before and '13' now" in failure["message"]


@pytest.mark.parametrize("takeover", ["critic", "first_difference"])
@pytest.mark.parametrize("lasts", [1, 3])
def test_after_a_stop_at_any_call_no_finished_call_is_made_again(
    workspace: Workspace, takeover: str, lasts: int
) -> None:
    verdicts = ('{"turn": 1}', '{"turn": 2}')
    whole = Teacher(*verdicts)
    run_of(workspace, whole, takeover=takeover, output="whole.jsonl")
    before = Teacher(*verdicts, lasts=lasts)
    with pytest.RaisesGroup(PowerCutError, flatten_subgroups=True):
        run_of(workspace, before, takeover=takeover)

    after = Teacher(*verdicts[before.served.count("critic") :])
    result = run_of(workspace, after, takeover=takeover)

    assert before.served + after.served == whole.served
    assert result.calls == len(after.served)
    kept = ("messages", "refined", "usage", "dropped", "reward")
    unbroken = sorted(
        read_rows(workspace.root / "whole.jsonl"), key=lambda row: row["messages"][0]["content"]
    )
    assert [[row[k] for k in kept] for row in rows_of(workspace)] == [
        [row[k] for k in kept] for row in unbroken
    ]


def test_the_budget_counts_the_critic_and_turns_that_were_not_taken(workspace: Workspace) -> None:
    (workspace.root / "prices.yml").write_text("m: {input: 1000, output: 1000}\n")
    dry = run_of(workspace, Teacher(), takeover="critic", turns="rest", dry_run=True)
    assert isinstance(dry, Forecast)
    assert dry.critic is not None
    assert (dry.critic.calls.low, dry.critic.calls.high) == (2, 4)
    assert dry.calls.low == 0
    assert dry.cost_usd is not None

    for takeover in ("critic", "first_difference"):
        teacher = Teacher('{"turn": 2}')
        result = run_of(
            workspace,
            teacher,
            takeover=takeover,
            output=f"{takeover}.jsonl",
            max_total_tokens=1,
            n=1,
        )
        assert (teacher.served, result.stopped_by) == ([], "max_total_tokens")


def test_a_student_continues_with_the_chat_template_of_its_rollouts(
    workspace: Workspace, tiny_models: TinyModels
) -> None:
    save_base(tiny_models, workspace.root / "base")
    record = {**TEACHER, "provider": "hf", "model": "base", "chat_template": "chatml"}
    rows = read_rows(workspace.root / "student.jsonl")
    write_rows(workspace.root / "student.jsonl", [{**row, "teacher": record} for row in rows])

    result = run_of(workspace, Teacher(), takeover="first_difference", turns="one", n=1)

    assert (result.requested, result.failed) == (1, 0)
    [row] = rows_of(workspace)
    assert row["refined"]["authors"][-1] == "student"


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ({"takeover": "critic", "refine": None}, "takeover requires refine"),
        (
            {"takeover": "start", "turns": "one"},
            "turns requires takeover: first_difference or critic",
        ),
        ({"turns": "one", "refine": None}, "turns requires refine"),
        (
            {"takeover": "first_difference", "critic": "critic.yml"},
            "critic requires takeover: critic",
        ),
        ({"samples_per_prompt": 2}, "samples_per_prompt must be 1"),
        ({"takeover": "critic", "context_file": "a.md"}, "context_file requires takeover: start"),
        ({"ray_address": "auto"}, "ray_address requires takeover: start"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], reported: str) -> None:
    given: dict[str, Any] = {"input": "p", "model": "m", "refine": "student.jsonl"}

    with pytest.raises(ValidationError, match=reported):
        GenerateRollouts(**(given | options))


@pytest.mark.parametrize("refine", [None, "student.jsonl"])
@pytest.mark.parametrize("takeover", ["start", "first_difference"])
def test_a_recorded_request_which_names_every_option_is_taken_as_it_was(
    refine: str | None, takeover: Takeover
) -> None:
    request = GenerateRollouts(input="p", model="m", refine=refine, takeover=takeover)

    assert GenerateRollouts.model_validate(request.model_dump()) == request


def test_rollouts_that_cannot_be_refined_are_refused(workspace: Workspace) -> None:
    with pytest.raises(InputError, match="`turns: one` needs a student that Stillroom can load"):
        run_of(workspace, Teacher(), takeover="critic", turns="one")
    with pytest.raises(InputError, match="only takeover start allows"):
        run_of(workspace, Teacher(), system="Be brief.")
    (workspace.root / "others.jsonl").write_text('{"prompt": "the chair?"}\n')
    with pytest.raises(InputError, match=r"that these rollouts were generated with$"):
        run_of(workspace, Teacher(), input="others.jsonl")
    write_rows(workspace.root / "student.jsonl", [rollout_row(success=None, reward=None)])
    with pytest.raises(DataError, match="has a reward, so none"):
        run_of(workspace, Teacher())
    (workspace.root / "student.jsonl").write_text('{"a": 1}\n')
    with pytest.raises((DataError, InputError)):
        run_of(workspace, Teacher())


def test_a_request_with_the_old_name_of_takeover_is_understood():
    request = GenerateRollouts.model_validate(
        {"input": "p", "model": "m", "refine": "r", "where": "critic"}
    )
    assert (request.takeover, request.where) == ("critic", None)
