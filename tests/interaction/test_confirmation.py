"""A person is asked by hosts that can ask: before a run spends without a limit, and about keys."""

import functools
import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client
from mcp.types import ElicitResult

from fakes.projects import endpoint_project
from fakes.task_client import task_client
from stillroom.settings import Workspace
from stillroom_mcp.app import build_server

PAID = {"input": "prompts.jsonl", "provider": "openai", "model": "gpt-5-mini", "tools": "tools.py"}


class Person:
    """Answers every question alike."""

    def __init__(self, action: str, **content: Any) -> None:
        self.answer = ElicitResult(action=action, content=content or None)
        self.questions: list[str] = []

    async def __call__(self, context: Any, params: Any) -> ElicitResult:
        self.questions.append(params.message)
        return self.answer


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    endpoint_project(tmp_path, num_prompts=2)
    # What is called is a closed port, which refuses at once.
    monkeypatch.setenv("OPENAI_API_KEY", "sk-nothing-is-called-with-this-one")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    return tmp_path


def requests_of(root: Path) -> list[dict[str, Any]]:
    return [
        json.loads(file.read_text(encoding="utf-8"))["request"]
        for file in root.glob("runs/*/request.json")
    ]


async def called(
    root: Path, mode: str, person: Person | None, tool: str = "generate_rollouts", **given: Any
) -> Any:
    options = {} if person is None else {"elicitation_callback": person}
    with anyio.fail_after(60):
        async with Client(build_server(Workspace(root)), mode=mode, **options) as client:
            result = await client.call_tool(tool, {**PAID, **given})
            run = (result.structured_content or {}).get("run_id")
            if run is not None:
                await client.call_tool("cancel_run", {"run_id": run})
            return result


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_run_without_a_cap_starts_with_the_one_that_the_person_sets(
    root: Path, mode: str
) -> None:
    person = Person("accept", start=True, budget_usd=2.5)
    result = anyio.run(called, root, mode, person)
    assert not result.is_error
    (question,) = person.questions
    assert "call gpt-5-mini at api.openai.com without a spending cap" in question
    (request,) = requests_of(root)
    assert request["budget_usd"] == 2.5


@pytest.mark.parametrize("mode", ["auto", "legacy"])
@pytest.mark.parametrize(
    "person",
    [Person("decline"), Person("cancel"), Person("accept", start=False), Person("accept")],
)
def test_nothing_starts_if_the_person_does_not_agree(root: Path, mode: str, person: Person) -> None:
    result = anyio.run(called, root, mode, person)
    assert result.is_error
    assert "fix: ask the user for a spending cap and set it as budget_usd" in result.content[0].text
    assert requests_of(root) == []


@pytest.mark.parametrize("budget_usd", [0, -1.0, "none", True])
def test_nothing_starts_with_a_cap_that_allows_no_paid_call(root: Path, budget_usd: Any) -> None:
    person = Person("accept", start=True, budget_usd=budget_usd)
    result = anyio.run(called, root, "auto", person)
    assert result.is_error
    assert f"cap, {budget_usd!r}, allows no paid call" in result.content[0].text
    assert requests_of(root) == []


def test_an_empty_field_is_no_limit_as_the_question_says(root: Path) -> None:
    result = anyio.run(called, root, "auto", Person("accept", start=True, budget_usd=""))
    assert not result.is_error


def test_nobody_is_asked_about_what_is_capped_free_or_faulty(root: Path) -> None:
    person = Person("decline")

    async def scenario() -> None:
        capped = await called(root, "auto", person, budget_usd=1)
        assert not capped.is_error
        # The run above may have begun its file by now.
        forecast = await called(root, "auto", person, dry_run=True, output="d.jsonl")
        assert not forecast.is_error
        local = await called(
            root, "auto", person, base_url="http://127.0.0.1:9/v1", output="l.jsonl"
        )
        assert not local.is_error
        faulty = await called(root, "auto", person, input="none.jsonl")
        assert "does not exist" in faulty.content[0].text

    anyio.run(scenario)
    assert person.questions == []


GATEWAY = {
    "base_url": "https://gw.test/v1",
    "api_key_env": "ATLAS_KEY",
    "model": "m",
    "budget_usd": 1,
}


@pytest.fixture
def keys_file(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    config = tmp_path_factory.mktemp("config")
    monkeypatch.setenv("STILLROOM_CONFIG", str(config))
    monkeypatch.setenv("ATLAS_KEY", "sk-nothing-is-called-with-this-one")
    (config / "keys.yml").write_text("- {key: MY_KEY, host: other.test}", encoding="utf-8")
    return config / "keys.yml"


@pytest.fixture
def priced(root: Path) -> Path:
    (root / "prices.yml").write_text("m: {input: 1, output: 1}\n", encoding="utf-8")
    return root


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_key_goes_to_another_host_once_the_person_agreed(
    priced: Path, keys_file: Path, mode: str
) -> None:
    person = Person("accept", allow=True)
    for output in ("a.jsonl", "b.jsonl"):
        result = anyio.run(
            functools.partial(called, priced, mode, person, output=output, **GATEWAY)
        )
        assert not result.is_error, result.content
    # The second call needs no question: keys.yml says it, and what it said before.
    (question,) = person.questions
    assert "send the key in ATLAS_KEY to gw.test" in question
    assert str(keys_file) in question
    assert keys_file.read_text(encoding="utf-8").splitlines() == [
        "- {key: MY_KEY, host: other.test}",
        '- {key: ATLAS_KEY, host: "gw.test"}',
    ]


@pytest.mark.parametrize("mode", ["auto", "legacy"])
@pytest.mark.parametrize(
    "person", [None, Person("decline"), Person("accept", allow=False), Person("accept", start=True)]
)
def test_a_key_stays_here_if_the_person_does_not_agree_or_cannot_be_asked(
    priced: Path, keys_file: Path, mode: str, person: Person | None
) -> None:
    before = keys_file.read_bytes()
    result = anyio.run(functools.partial(called, priced, mode, person, **GATEWAY))
    assert result.is_error
    refused = "may not be sent to gw.test" if person is None else "did not agree to send the key in"
    assert refused in result.content[0].text
    assert (requests_of(priced), keys_file.read_bytes()) == ([], before)


def test_a_task_begins_after_the_person_agreed(root: Path) -> None:
    async def scenario() -> None:
        async with task_client(
            build_server(Workspace(root)), elicitation_callback=Person("accept")
        ) as client:
            first = await client.call("generate_rollouts", PAID)
            assert first["resultType"] == "input_required"
            assert requests_of(root) == []
            (key,) = first["inputRequests"]
            agreed = {key: {"action": "accept", "content": {"start": True}}}
            more = {"inputResponses": agreed}
            if "requestState" in first:
                more["requestState"] = first["requestState"]
            task = await client.call("generate_rollouts", PAID, **more)
            assert task["resultType"] == "task"
            await client.send("tasks/cancel", taskId=task["taskId"])
            await client.ended(task["taskId"])

    anyio.run(scenario)
    (request,) = requests_of(root)
    assert request["budget_usd"] is None
