"""A dry run's bounds against what runs with random settings come to take."""

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fakes.metered_endpoint import JUDGE_HOST, MeteredEndpoint
from fakes.reporters import KeptReporter
from fakes.rollout_rows import read_rows, write_rows
from fakes.rollout_runs import GIVEN, run_rollouts
from fakes.user_files import write_tools
from fakes.waiting import run_async
from stillroom.errors import DataError, InputError
from stillroom.evaluate.request import EvaluateModel
from stillroom.evaluate.run import evaluate_model
from stillroom.importing.request import ImportRollouts
from stillroom.importing.run import import_rollouts
from stillroom.projects.create import CreateProject, create_project
from stillroom.rollout.forecast import Forecast, ForecastRange
from stillroom.settings import Workspace

TOOLS = '''
    @tool
    def price(item: str) -> str:
        """Returns the price of an item of the shop."""
        return "{character}" * {length}

    @tool
    def stock(item: str) -> int:
        """Returns how many there are."""
        return 7
    '''
REWARDS = """
    @reward(precondition=True)
    def lucky(args, messages):
        return float(len(messages[-1].get("content") or "") % 2)
    """


def workspace_in(folder: Path, prompts: list[str], **judge: Any) -> Workspace:
    rows = [{"prompt": prompt, "rewards": ["judge"]} for prompt in prompts]
    write_rows(folder / "prompts.jsonl", rows)
    reported = {"model": "j", "base_url": f"http://{JUDGE_HOST}/v1", "rubric": "Be right.", **judge}
    (folder / "judge.yml").write_text(json.dumps(reported), encoding="utf-8")
    prices = {"m": {"input": 2, "output": 10}, "j": {"input": 8, "output": 1}}
    (folder / "prices.yml").write_text(json.dumps(prices), encoding="utf-8")
    return Workspace(folder)


def run_of(workspace: Workspace, endpoint: MeteredEndpoint, **changes: Any) -> Any:
    return run_rollouts(
        workspace, endpoint.handle, **{"judge": "judge.yml", "concurrency": 2, **changes}
    )


def holds(bounds: ForecastRange | None, actual: float | None) -> bool:
    assert bounds is not None
    assert actual is not None
    return bounds.low <= actual * (1 + 1e-9) and actual <= bounds.high * (1 + 1e-9)


def check(workspace: Workspace, endpoint: MeteredEndpoint, **changes: Any) -> Forecast:
    """Runs dry and then in earnest; all that was told must hold."""
    reported = run_of(workspace, endpoint, dry_run=True, **changes)
    assert isinstance(reported, Forecast)
    assert reported.judge is not None
    assert endpoint.calls == {"teacher": 0, "judge": 0}
    result = run_of(workspace, endpoint, **changes)
    assert result.failed == 0
    teacher, judge = endpoint.usage["teacher"], endpoint.usage["judge"]
    assert holds(reported.calls, endpoint.calls["teacher"])
    assert holds(reported.prompt_tokens, teacher.prompt_tokens), (reported, teacher)
    assert holds(reported.completion_tokens, teacher.completion_tokens)
    assert holds(reported.judge.calls, endpoint.calls["judge"])
    assert holds(reported.judge.prompt_tokens, judge.prompt_tokens), (reported, judge)
    assert holds(reported.judge.completion_tokens, judge.completion_tokens)
    assert holds(reported.cost_usd, result.cost_usd)
    for bounds in (
        reported.calls,
        reported.prompt_tokens,
        reported.completion_tokens,
        reported.cost_usd,
    ):
        assert bounds is not None
        assert bounds.low <= bounds.expected <= bounds.high
    return reported


PROMPTS = st.lists(st.text(min_size=1, max_size=200), min_size=1, max_size=4)
SETTINGS = st.fixed_dictionaries(
    {
        "samples_per_prompt": st.integers(1, 3),
        "max_turns": st.integers(1, 6),
        "max_tokens": st.integers(1, 4000),
        "system": st.none() | st.just("Be brief. " * 20),
    }
)
ENDPOINTS = st.builds(
    MeteredEndpoint,
    st.integers(0, 1 << 30),
    wordy=st.sampled_from([1 / 8, 0.5, 1]),
    framing=st.sampled_from([0, 1]),
    eager=st.sampled_from([0.5, 0.9, 1.0]),
    greedy=st.booleans(),
)
JUDGES = st.fixed_dictionaries(
    {
        "sees": st.sampled_from(["answer", "conversation"]),
        "reply_format": st.sampled_from(["json_schema", "json_object", "none"]),
        "max_tokens": st.integers(64, 300),
    }
)


@pytest.mark.thorough
@settings(max_examples=10)
@given(PROMPTS, ENDPOINTS, JUDGES, SETTINGS, st.none() | st.text(min_size=1, max_size=80))
# An answer of one letter, shorter than what a judge is told of an empty one.
@example(
    ["0"],
    MeteredEndpoint(0, wordy=1 / 8, framing=0, eager=0.5),
    {"sees": "answer", "reply_format": "none", "max_tokens": 64},
    {"samples_per_prompt": 1, "max_turns": 1, "max_tokens": 1, "system": None},
    None,
)
def test_without_tools_a_run_takes_what_the_dry_run_told(
    prompts: list[str],
    endpoint: MeteredEndpoint,
    judge: dict[str, Any],
    options: dict[str, Any],
    nudge: str | None,
) -> None:
    nudged = {"termination_policy": "max_turns", "nudge": nudge} if nudge is not None else {}
    with tempfile.TemporaryDirectory() as folder:
        workspace = workspace_in(Path(folder), [f"p{one}" for one in prompts], **judge)
        reported = check(workspace, endpoint, **options, **nudged)

    if nudge is None:
        assert reported.calls.low == reported.calls.expected == reported.calls.high
    assert reported.judge is not None
    assert reported.judge.calls.low == reported.todo


@settings(max_examples=6)
@given(PROMPTS, ENDPOINTS, JUDGES, SETTINGS, st.data())
def test_with_tools_a_run_takes_what_the_dry_run_told(
    prompts: list[str],
    endpoint: MeteredEndpoint,
    judge: dict[str, Any],
    options: dict[str, Any],
    data: st.DataObject,
) -> None:
    cut = data.draw(st.none() | st.integers(1, 500))
    # Two replies to a turn take together what one may take.
    length = data.draw(st.integers(0, 4 * cut if cut else 1500))
    character = data.draw(st.sampled_from(["x", "é", "😀"]))
    is_nudged = data.draw(st.booleans())
    policy = "max_turns" if is_nudged else "last_tool"
    with tempfile.TemporaryDirectory() as folder:
        workspace = workspace_in(Path(folder), [f"p{one}" for one in prompts], **judge)
        write_tools(workspace.root, TOOLS.format(character=character, length=length))
        reported = check(
            workspace,
            endpoint if cut is None else one_call_a_turn(endpoint),
            tools="tools.py",
            max_tool_response=cut,
            termination_policy=policy,
            **options,
        )

    most = reported.todo * options["max_turns"]
    assert (reported.calls.low, reported.calls.high) == (reported.todo, most)
    if options["max_turns"] > 1:
        assert "tools' replies" in reported.assumes[-1]


@pytest.mark.parametrize("sees", ["answer", "conversation"])
@pytest.mark.parametrize("way", ["tools", "cut tools", "nudge"])
def test_the_most_is_what_the_worst_endpoint_takes_and_little_more(
    tmp_path: Path, way: str, sees: str
) -> None:
    workspace = workspace_in(tmp_path, ["x" * 3000] * 3, sees=sees, max_tokens=900)
    endpoint = MeteredEndpoint(1, wordy=1, framing=1, eager=1, greedy=True)
    endpoint.most_calls = 1
    options: dict[str, Any] = {"max_turns": 5, "max_tokens": 700}
    if way == "nudge":
        options |= {"termination_policy": "max_turns", "nudge": "y" * 2000}
    else:
        options |= {"tools": "tools.py", "termination_policy": "max_turns"}
        only_price = TOOLS.partition("@tool\n    def stock")[0]
        length = 16_384 // 4 if way == "tools" else 3000
        write_tools(tmp_path, only_price.format(character="😀", length=length))
        options |= {"max_tool_response": 2000 if way == "cut tools" else None}

    reported = check(workspace, endpoint, **options)

    assert reported.judge is not None
    assert reported.calls.high == endpoint.calls["teacher"]
    assert reported.completion_tokens.high == endpoint.usage["teacher"].completion_tokens
    assert reported.judge.calls.high == endpoint.calls["judge"]
    slack = 1.05
    assert reported.prompt_tokens.high < slack * endpoint.usage["teacher"].prompt_tokens
    # The last turn of some calls a tool, and then there is no answer to be read.
    assert reported.judge.prompt_tokens.high < 1.5 * endpoint.usage["judge"].prompt_tokens


def one_call_a_turn(endpoint: MeteredEndpoint) -> MeteredEndpoint:
    endpoint.most_calls = 1
    return endpoint


def test_a_precondition_may_save_the_judge(tmp_path: Path) -> None:
    workspace = workspace_in(tmp_path, ["a", "b", "c"])
    rows = [{"prompt": prompt, "rewards": ["judge", "lucky"]} for prompt in "abc"]
    write_rows(tmp_path / "prompts.jsonl", [*rows, {"prompt": "d"}])
    write_tools(tmp_path, REWARDS, name="rewards.py")
    endpoint = MeteredEndpoint(1, wordy=0.5, framing=0, eager=0)

    reported = check(workspace, endpoint, rewards="rewards.py")

    assert reported.judge is not None
    assert (reported.judge.calls.low, reported.judge.calls.expected, reported.judge.calls.high) == (
        0,
        3,
        9,
    )


def test_a_dry_run_counts_the_schemas_of_the_tools(tmp_path: Path) -> None:
    workspace = workspace_in(tmp_path, ["a"])
    endpoint = MeteredEndpoint(1, wordy=1, framing=0, eager=0)

    def most(description: str) -> float:
        code = TOOLS.replace("how many there are", description).format(character="x", length=1)
        write_tools(tmp_path, code)
        reported = run_of(workspace, endpoint, dry_run=True, tools="tools.py", max_turns=3)
        return reported.prompt_tokens.high

    # They go with each of three calls.
    assert most("x" * 1000) - most("x" * 10) == 3 * 990


def test_turns_on_record_are_told_as_paid(tmp_path: Path) -> None:
    workspace = workspace_in(tmp_path, ["a", "b", "c"])
    run_of(workspace, MeteredEndpoint(1, wordy=0.5, framing=0, eager=0), judge="judge.yml", n=2)
    # Their rows are lost, and what was sampled is on record.
    journal = tmp_path / ".out.jsonl" / "journal.jsonl"
    lines = [
        {"type": "turn", "task_id": row["task_id"], "sample": row["sample"], "index": 0}
        | {"turn": {"message": row["messages"][-1], "finish_reason": "stop", "usage": row["usage"]}}
        for row in read_rows(tmp_path / "out.jsonl")
    ]
    written = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    journal.write_bytes(written + b'{"type": "turn", "task')
    (tmp_path / "out.jsonl").write_bytes(b"")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    reported = run_of(workspace, MeteredEndpoint(2, wordy=0.5, framing=0, eager=0), dry_run=True)

    assert reported.calls == ForecastRange(1, 1, 1)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_dry_run_finds_what_would_stop_the_run(tmp_path: Path) -> None:
    workspace = workspace_in(tmp_path, ["a"])
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": "a", "tools": ["prize"]}])
    write_tools(tmp_path, TOOLS.format(character="x", length=1))
    endpoint = MeteredEndpoint(1, wordy=0.5, framing=0, eager=0)

    with pytest.raises(DataError, match="names the unknown tool 'prize'"):
        run_of(workspace, endpoint, dry_run=True, tools="tools.py")


@pytest.mark.thorough
def test_prompts_of_a_log_are_expected_to_take_what_the_log_says(tmp_path: Path) -> None:
    workspace = workspace_in(tmp_path, [])
    create_project(workspace, CreateProject(path="app", template="traces"))
    request = ImportRollouts(input="app/traces", output="rollouts/app.jsonl", prompts=True)
    import_rollouts(workspace, request)
    logged = [row["usage"] for row in read_rows(tmp_path / "rollouts/app.jsonl")]
    endpoint = MeteredEndpoint(1, wordy=0.5, framing=0, eager=0)

    reported = run_of(
        workspace, endpoint, dry_run=True, judge="none", input="rollouts/app.prompts.jsonl"
    )

    request = EvaluateModel(
        data="rollouts/app.prompts.jsonl", model="m", base_url=GIVEN["base_url"], dry_run=True
    )
    evaluated = run_async(
        partial(evaluate_model, workspace, request, folder=tmp_path, reporter=KeptReporter())
    )

    each = {name: sum(usage[name] for usage in logged) / len(logged) for name in logged[0]}
    usd = (2 * each["prompt_tokens"] + 10 * each["completion_tokens"]) / 1e6
    for expected in (reported, evaluated):
        assert expected.cost_usd.expected == pytest.approx(expected.todo * usd, rel=0.5)
        assert expected.based_on == f"{len(logged)} rows of rollouts/app.jsonl"


def test_a_dry_run_asks_for_no_consent_to_send_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = workspace_in(tmp_path, ["a"])
    monkeypatch.setenv("ATLAS_KEY", "k")
    endpoint = MeteredEndpoint(1, wordy=0.5, framing=0, eager=0)

    reported = run_of(workspace, endpoint, dry_run=True, api_key_env="ATLAS_KEY")

    assert isinstance(reported, Forecast)
    with pytest.raises(InputError, match=r"ATLAS_KEY may not be sent to teacher\.test"):
        run_of(workspace, endpoint, api_key_env="ATLAS_KEY")


def test_a_dry_run_needs_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = workspace_in(tmp_path, ["a"])
    judge = "model: gpt-4o-mini\nrubric: Is it right?\nprovider: openai\n"
    (tmp_path / "judge.yml").write_text(judge, encoding="utf-8")
    for name in ("OPENROUTER_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    endpoint = MeteredEndpoint(1, wordy=0.5, framing=0, eager=0)
    hosted: dict[str, Any] = {"provider": "openrouter", "base_url": None, "model": "gpt-4o-mini"}

    reported = run_of(workspace, endpoint, dry_run=True, **hosted)

    assert isinstance(reported, Forecast)
    assert reported.cost_usd is not None
    with pytest.raises(InputError, match="requires a key"):
        run_of(workspace, endpoint, **hosted)
    monkeypatch.setenv("OPENROUTER_API_KEY", "two\nlines")
    with pytest.raises(InputError, match="not allowed in an HTTP header"):
        run_of(workspace, endpoint, dry_run=True, **hosted)


def test_a_dry_run_of_changed_settings_is_refused_as_the_run_is(tmp_path: Path) -> None:
    workspace = workspace_in(tmp_path, ["a"])
    endpoint = MeteredEndpoint(1, wordy=0.5, framing=0, eager=0)
    run_of(workspace, endpoint)

    for is_dry in (True, False):
        with pytest.raises(InputError, match="max_turns was 10, now 3"):
            run_of(workspace, endpoint, dry_run=is_dry, max_turns=3)
