import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.data.formats import Task, task_from_row
from stillroom.errors import InputError
from stillroom.evaluate.request import EvaluateModel, plan_evaluation
from stillroom.rollout.plan import (
    GenerationPlan,
    output_settings,
    plan_generation,
    sampling_settings,
    select_entries,
)
from stillroom.rollout.request import GenerateRollouts
from stillroom.settings import Workspace
from stillroom.types import SamplingSettings

TASKS = [task_from_row({"prompt": str(index)}) for index in range(10)]
LOCAL = "http://127.0.0.1:8000/v1"


def request(**changes: Any) -> GenerateRollouts:
    given = {"input": "prompts.jsonl", "model": "m", "provider": "openai", "base_url": LOCAL}
    return GenerateRollouts(**{**given, **changes})


def chosen(entries: str | None = None, n: int | None = None) -> str:
    return "".join(_prompt(task) for task in select_entries(TASKS, n=n, entries=entries))


def _prompt(task: Task) -> str:
    return str(task.messages[0].get("content"))


@pytest.mark.parametrize(
    ("entries", "n", "prompts"),
    [
        (None, None, "0123456789"),
        (None, 3, "012"),
        (None, 99, "0123456789"),
        ("0,2,5-9", None, "0256789"),
        ("0,2,5-9", 4, "0256"),
        ("9,0", None, "90"),
        (" 1 , 3-3 ", None, "13"),
        ("0-9", None, "0123456789"),
    ],
)
def test_entries_and_n_choose_prompts_in_their_order(
    entries: str | None, n: int | None, prompts: str
) -> None:
    assert chosen(entries, n) == prompts


@pytest.mark.parametrize(
    "entries", ["", ",", "a", "1,,2", "-3", "3-", "1-2-3", "5–9", "1.5", "10", "8-10", "5-3", "0x1"]
)
def test_entries_that_choose_nothing_that_is_there_are_refused(entries: str) -> None:
    with pytest.raises(InputError, match="entries"):
        chosen(entries)


@given(st.text(alphabet="0123456789,- ", max_size=8))
def test_entries_are_either_indices_of_the_file_or_refused(entries: str) -> None:
    try:
        prompts = chosen(entries)
    except InputError as error:
        reported = error.problem
    else:
        assert prompts
        assert set(prompts) <= set("0123456789")
        return
    assert repr(entries) in reported


def test_a_request_samples_as_it_says() -> None:
    requested = request(top_p=0.5, max_tokens=7, seed=3)

    assert sampling_settings(requested, temperature=0.25) == SamplingSettings(
        temperature=0.25, top_p=0.5, max_tokens=7, seed=3
    )


def test_what_can_be_known_to_be_wrong_is_refused_before_a_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    workspace = Workspace(tmp_path)
    (tmp_path / "prompts.jsonl").touch()
    (tmp_path / "tools.txt").touch()
    (tmp_path / "folder.py").mkdir()
    plan = plan_generation(workspace, request(tools="none"))
    assert plan.output == tmp_path / "rollouts/rollouts.jsonl"

    for changes, text in [
        ({"base_url": None}, "OPENAI_API_KEY"),
        ({"tools": "missing.py"}, "missing.py"),
        ({"tools": "tools.txt"}, "tools file"),
        ({"tools": "folder.py"}, "tools file"),
        ({"rewards": "missing.py"}, "missing.py"),
        ({"provider": "hf"}, "base_url"),
    ]:
        with pytest.raises(InputError, match=text):
            plan_generation(workspace, request(**changes))


def test_an_outputs_settings_are_what_shapes_a_rollout_and_nothing_else(tmp_path: Path) -> None:
    workspace, prompts = Workspace(tmp_path), tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n', encoding="utf-8")
    (tmp_path / "tools.py").write_text("x = 1\n", encoding="utf-8")

    def of(**changes: Any) -> dict[str, Any]:
        plan = plan_generation(workspace, request(tools="tools.py", **changes))
        return output_settings(plan.rollouts, weights=None)

    first = of()
    for changes in ({"concurrency": 3}, {"n": 1}, {"entries": "0"}, {"samples_per_prompt": 4}):
        assert of(**changes) == first
    for changes in ({"model": "x"}, {"max_turns": 3}, {"seed": 1}, {"top_p": 0.5}):
        assert of(**changes) != first
    nudged = {"termination_policy": "max_turns"}
    assert first["nudge"] is None
    assert of(**nudged)["nudge"] != of(**nudged, nudge="Sure?")["nudge"] == "Sure?"
    (tmp_path / "tools.py").write_text("x = 2\n", encoding="utf-8")
    assert [name for name, value in of().items() if value != first[name]] == ["tools_sha256"]
    prompts.write_text('{"prompt": "b"}\n', encoding="utf-8")
    assert "input_sha256" in [name for name, value in of().items() if value != first[name]]
    assert of(system="s")["system"] == "s"


def test_an_output_records_every_option_that_changes_what_a_rollout_says(
    tmp_path: Path,
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-8")
    plan = plan_generation(Workspace(tmp_path), request())

    assert set(output_settings(plan.rollouts, weights=None)) >= {
        "model", "provider", "base_url", "max_tokens", "max_turns", "temperature", "top_p", "seed",
        "reasoning_effort", "include_thinking", "max_tool_response", "browse", "answer_match",
        "system", "nudge", "judge", "mcp_servers",
    }  # fmt: skip


def test_a_nudge_that_nobody_says_is_refused() -> None:
    with pytest.raises(ValueError, match="nudge requires termination_policy: max_turns"):
        request(nudge="Sure?")


def test_a_context_is_read_after_the_system_message_and_shapes_the_rollouts(
    tmp_path: Path,
) -> None:
    workspace, prompts = Workspace(tmp_path), tmp_path / "prompts.jsonl"
    own = {"role": "system", "content": "Be a clerk."}
    asked = {"role": "user", "content": "What?"}
    prompts.write_text(json.dumps({"messages": [own, asked]}), encoding="utf-8")
    (tmp_path / "SKILL.md").write_text("Add seven.\n", encoding="utf-8")

    def planned(**changes: Any) -> GenerationPlan:
        return plan_generation(workspace, request(**changes))

    plain, instructed = planned(), planned(context_file="SKILL.md")
    with plain.open_tasks() as before, instructed.open_tasks() as after:
        assert after[0].messages == [
            {"role": "system", "content": "Be a clerk.\n\nAdd seven."},
            asked,
        ]
        assert after[0].task_id == before[0].task_id
    with planned(context_file="SKILL.md", system="Hello.").open_tasks() as both:
        assert both[0].messages[0].get("content") == "Hello.\n\nAdd seven."
    assert tmp_path / "SKILL.md" in instructed.rollouts.inputs
    # An output that was begun without a context goes on, for it has none of its own.
    assert "context" not in output_settings(plain.rollouts, None)
    first = output_settings(instructed.rollouts, None)
    (tmp_path / "SKILL.md").write_text("Add eight.\n", encoding="utf-8")
    assert output_settings(planned(context_file="SKILL.md").rollouts, None) != first
    with pytest.raises(InputError, match=r"context_file 'gone\.md' does not exist"):
        planned(context_file="gone.md")


def test_an_evaluation_with_another_prompt_is_of_the_same_tasks(tmp_path: Path) -> None:
    (tmp_path / "heldout.jsonl").write_text('{"prompt": "What?"}\n', encoding="utf-8")

    def tasks(**changes: Any) -> list[Task]:
        of = EvaluateModel(data="heldout.jsonl", model="m", base_url=LOCAL, **changes)
        return plan_evaluation(Workspace(tmp_path), of).rollouts.load_tasks()

    assert [task.task_id for task in tasks()] == [task.task_id for task in tasks(system="Hi.")]
    assert tasks(system="Hi.")[0].messages[0] == {"role": "system", "content": "Hi."}
