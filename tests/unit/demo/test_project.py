"""The files of a user's project and the world they come from must agree."""

import json
from pathlib import Path
from random import Random

import pytest

import stillroom.demo
from demo_models.conversations import (
    TOOL_SCHEMAS,
    gold_messages,
    is_correct,
    noisy_messages,
    run_tool,
)
from stillroom.demo.shop import TASK_TYPES
from stillroom.demo.world import make_task, task_row
from stillroom.tools.schema import tool_schema
from stillroom.tools.user.file import (
    RewardArgs,
    ToolArgs,
    ToolMark,
    load_user_file,
    marked_functions,
    read_user_file,
)

PROJECT = Path(stillroom.demo.__file__).parent / "project"


@pytest.fixture(scope="module")
def tools():
    return marked_functions(load_user_file(read_user_file(PROJECT / "tools.py")), ToolMark)


@pytest.fixture(scope="module")
def correct_answer():
    return load_user_file(read_user_file(PROJECT / "rewards.py")).correct_answer


def project_reply(tools, task, name, arguments):
    given = dict(arguments)
    if name != "calculator":
        given["args"] = ToolArgs(metadata=dict(task_row(task)["metadata"]))
    try:
        return str(tools[name](**given))
    except ValueError as problem:
        return f"error: {problem}"


def test_the_project_tools_answer_as_the_world_does(tools):
    rng = Random(5)
    for _ in range(500):
        task = make_task(rng, rng.choice(TASK_TYPES))
        for message in noisy_messages(task, rng):
            for call in message.get("tool_calls", []):
                name, arguments = (
                    call["function"]["name"],
                    json.loads(call["function"]["arguments"]),
                )

                reply = project_reply(tools, task, name, arguments)
                assert reply == run_tool(task, name, arguments)


def test_the_project_tools_refuse_as_the_world_does(tools):
    rng = Random(6)
    task = make_task(rng, "bulk")
    expressions = [
        "".join(rng.choices("0123456789+-*() a/", k=rng.randint(0, 45))) for _ in range(5000)
    ] + ["99999*99999", "2**9", "5(3)", "()", "+1"]
    calls = [("calculator", {"expression": text}) for text in expressions]
    calls += [("price", {"item": "unicorn"}), ("stock", {"item": ""})]
    for name, arguments in calls:
        assert project_reply(tools, task, name, arguments) == run_tool(task, name, arguments)


def test_the_world_shows_a_model_the_project_tools(tools):
    shown = [
        (schema["function"]["name"], list(schema["function"]["parameters"]["properties"]))
        for schema in TOOL_SCHEMAS
    ]
    schemas = [tool_schema(function)["function"] for function in tools.values()]

    assert shown == [(s["name"], list(s["parameters"]["properties"])) for s in schemas]


def test_the_reward_judges_as_the_world_does(correct_answer):
    rng = Random(7)
    for _ in range(300):
        task = make_task(rng, rng.choice(TASK_TYPES))
        args = RewardArgs(metadata=dict(task_row(task)["metadata"]))
        noisy = noisy_messages(task, rng)

        assert correct_answer(args, gold_messages(task)) == 1.0
        assert correct_answer(args, noisy) == is_correct(noisy[-1]["content"], task.expected_answer)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user", "content": "The answer is 3."}],
        [{"role": "assistant", "content": None}],
        [
            {"role": "assistant", "content": "The answer is 3."},
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": "", "tool_calls": []},
        ],
    ],
)
def test_the_reward_reads_the_last_assistant_text_only(correct_answer, messages):
    assert correct_answer(RewardArgs(metadata={"expected_answer": "3"}), messages) == 0.0
