"""The MCP server as clients see it: tools, schemas, strict arguments, errors, runs."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import jsonschema
import pytest
from mcp import Client, StdioServerParameters

from fakes.http_endpoint import ScriptedEndpoint
from fakes.projects import endpoint_project
from stillroom.api import OPERATIONS
from stillroom.settings import Workspace
from stillroom_mcp.app import build_server
from stillroom_mcp.commands import ALL, TOOLSETS, chosen_operations
from stillroom_mcp.early_server import LISTING, listing_of

GOLDEN = Path(__file__).parent.parent / "golden" / "tools.json"
TOKEN_LIMIT = 5800
CORE_TOKEN_LIMIT = 3350
HEAVY = (
    "torch",
    "transformers",
    "playwright",
    "datasets",
    "peft",
    "numpy",
    "aiohttp",
    "gguf",
    "xllamacpp",
)


@asynccontextmanager
async def client_of(root: Path, mode: str = "auto") -> AsyncIterator[Client]:
    with anyio.fail_after(60):
        async with Client(build_server(Workspace(root)), mode=mode) as client:
            yield client


def text_of(result: Any) -> str:
    return " ".join(block.text for block in result.content)


def model_view(tools: list[Any]) -> list[dict[str, Any]]:
    """What a model reads of the tools."""
    return [
        {"name": tool.name, "description": tool.description, "input_schema": tool.input_schema}
        for tool in tools
    ]


def test_the_list_of_tools_is_as_reviewed(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    async def listed() -> list[Any]:
        async with client_of(tmp_path) as client:
            return (await client.list_tools()).tools

    seen = model_view(anyio.run(listed))
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text(json.dumps(seen, indent=2) + "\n", encoding="utf-8")
    assert seen == json.loads(GOLDEN.read_text(encoding="utf-8"))


def test_every_tool_is_in_a_set() -> None:
    assert {name for names in TOOLSETS.values() for name in names} == {o.name for o in OPERATIONS}


@pytest.mark.parametrize("toolset", [*TOOLSETS, ALL])
@pytest.mark.parametrize("is_read_only", [False, True])
def test_a_set_of_tools_is_offered_alone_and_explains_every_option_itself(
    tmp_path: Path, toolset: str, is_read_only: bool
) -> None:
    offered = chosen_operations([toolset], is_read_only=is_read_only)

    async def listed() -> list[Any]:
        with anyio.fail_after(60):
            async with Client(build_server(Workspace(tmp_path), offered)) as client:
                return (await client.list_tools()).tools

    tools = {tool.name: tool for tool in anyio.run(listed)}
    names = {*(TOOLSETS.get(toolset) or (o.name for o in OPERATIONS))}
    kept = {o.name for o in OPERATIONS if o.is_read_only or not is_read_only}
    assert set(tools) == names & kept
    view = json.dumps(model_view([*tools.values()]), separators=(",", ":"))
    limit = 4 * (CORE_TOKEN_LIMIT if toolset == "core" else TOKEN_LIMIT)
    assert len(view) <= limit, (
        f"the list of {toolset} tools is {len(view) - limit} characters too long: shorten "
        "descriptions in the requests of these tools"
    )
    # Every sentence about an option stands in one of the tools that are offered.
    said = {
        (name, option.get("description"))
        for tool in tools.values()
        for name, option in tool.input_schema["properties"].items()
    }
    for operation in offered:
        for name, field in operation.request.model_fields.items():
            if field.description and not (field.json_schema_extra or name == "overwrite"):
                assert (name, field.description) in said, (operation.name, name)


def test_what_is_listed_before_the_engine_is_loaded_is_what_the_whole_server_says(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    expected = listing_of(build_server(Workspace(tmp_path)))
    if request.config.getoption("--update-golden"):
        LISTING.write_text(expected, encoding="utf-8")
    assert LISTING.read_text(encoding="utf-8") == expected


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_every_tool_has_annotations_schemas_and_a_one_line_description(
    tmp_path: Path, mode: str
) -> None:
    async def scenario() -> None:
        async with client_of(tmp_path, mode) as client:
            for tool in (await client.list_tools()).tools:
                hints = tool.annotations
                assert hints is not None
                values = (hints.read_only_hint, hints.destructive_hint, hints.idempotent_hint,
                          hints.open_world_hint)  # fmt: skip
                assert all(isinstance(value, bool) for value in values), tool.name
                assert tool.description
                assert "\n" not in tool.description
                assert tool.input_schema["additionalProperties"] is False
                assert tool.output_schema is not None
                assert tool.output_schema["type"] == "object"
                assert "next_step" in tool.output_schema["properties"]
                jsonschema.Draft202012Validator.check_schema(tool.input_schema)
                jsonschema.Draft202012Validator.check_schema(tool.output_schema)

    anyio.run(scenario)


ASKED = {"input": "prompts.jsonl", "model": "demo/teacher"}
EVALUATED = {"data": "prompts.jsonl", "model": "demo/student"}
FILTERED = {"input": "sft.jsonl", "output": "kept.jsonl"}
BAD_CALLS = [
    ("get_run", {"runid": "x"}, "runid is not known (did you mean 'run_id'?)"),
    ("get_run", {"run_id": "no-such-run"}, "there is no run 'no-such-run'"),
    ("get_run", {"run_id": 3}, "run_id: input should be a valid string, not 3"),
    ("get_run_logs", {"run_id": "nope"}, "there is no run 'nope'"),
    ("cancel_run", {"run_id": "nope"}, "there is no run 'nope'"),
    ("list_runs", {"status": "done"}, "status: input should be 'starting'"),
    ("list_runs", {"cursor": "abc"}, "pass next_cursor unchanged"),
    (
        "create_project",
        {"template": "dmo"},
        "'demo', 'starter', 'on-policy-agent', 'refine', 'other-tokenizer' or 'traces', not 'dmo'",
    ),
    ("create_project", {"path": "../elsewhere"}, "is outside the workspace"),
    ("check_setup", {"modle": "x"}, "did you mean 'model'?"),
    ("validate_dataset", {"path": "nothing.jsonl"}, "path 'nothing.jsonl' does not exist"),
    ("validate_dataset", {"path": "broken.jsonl", "formt": "sft"}, "did you mean 'format'?"),
    (
        "generate_rollouts",
        {"input": "prompts.jsonl", "model": "m", "temprature": 1},
        "did you mean 'temperature'?",
    ),
    (
        "generate_rollouts",
        {"input": "missing.jsonl", "model": "demo/teacher"},
        "input 'missing.jsonl' does not exist",
    ),
    (
        "generate_rollouts",
        {"input": "prompts.jsonl", "model": "no-such-model"},
        "there is no model 'no-such-model'",
    ),
    (
        "generate_rollouts",
        {"input": "prompts.jsonl", "model": "x", "provider": "openrouter"},
        "OPENROUTER_API_KEY is not set",
    ),
    (
        "generate_rollouts",
        {"input": "prompts.jsonl", "model": "demo/teacher", "tools": "toolz.py"},
        "tools file 'toolz.py' does not exist",
    ),
    ("filter_dataset", {"input": "a.jsonl", "output": "b.jsonl"}, "input 'a.jsonl' does not exist"),
    ("filter_dataset", {"input": "prompts.jsonl"}, "output is required"),
    (
        "convert_rollouts",
        {"input": "prompts.jsonl", "output": "out.jsonl"},
        "none of the 3 rows",
    ),
    ("make_dpo_pairs", {"output": "p.jsonl"}, "give either input, or chosen_from"),
    ("inspect_examples", {"path": "broken.jsonl", "n": 0}, "n: input should be greater"),
    ("inspect_examples", {"path": "prompts.jsonl", "start": 99}, "beyond the 3 rows"),
    ("plan_training", {"config": "bad.yml"}, "trainer.num_epoch is not known (did you mean"),
    ("plan_training", {"config": "model.yml"}, "there is no model 'nowhere'"),
    ("start_training", {"resume": "nope"}, "there is no run 'nope'"),
    ("start_training", {"config": "none.yml"}, "config 'none.yml' does not exist"),
    ("start_training", {"config": "bad.yml"}, "trainer.num_epoch is not known (did you mean"),
    ("start_training", {"config": "rows.yml"}, "broken.jsonl:7: the line is not valid JSON"),
    ("start_training", {"config": "model.yml"}, "there is no model 'nowhere'"),
    ("start_training", {"config": "teacher.yml"}, "Unsupported teacher model 'gpt-5-nano'"),
    (
        "evaluate_model",
        {"model": "nowhere", "data": "prompts.jsonl"},
        "there is no model 'nowhere'",
    ),
    ("evaluate_model", {"model": "demo/student"}, "data is required"),
    ("export_model", {"model": "nowhere", "output": "out"}, "there is no model 'nowhere'"),
    ("export_model", {"model": "demo/student", "output": "../out"}, "is outside the workspace"),
    ("export_model", {"model": "demo/student", "output": "broken.jsonl"}, "is not an export"),
    (
        "export_model",
        {"model": "demo/student", "output": "out", "format": "adapter"},
        "has no adapter",
    ),
    ("create_project", {}, "already has prompts.jsonl"),
    ("check_setup", {"provider": "opnrouter"}, "provider: input should be"),
    ("validate_dataset", {"path": "sft.jsonl", "report": "x.txt"}, "ends with .html"),
    ("validate_dataset", {"path": "../x.jsonl"}, "../x.jsonl"),
    (
        "generate_rollouts",
        {"input": "prompts.jsonl", "provider": "demo", "model": "teacher", "base_url": "http://a"},
        "base_url cannot be used with provider 'demo'",
    ),
    (
        "generate_rollouts",
        {"input": "prompts.jsonl", "model": "m", "base_url": "http://a/v1", "budget_usd": 1},
        "budget_usd needs the price of 'm'",
    ),
    (
        "generate_rollouts",
        {**ASKED, "nudge": "Again."},
        "nudge requires termination_policy: max_turns",
    ),
    ("generate_rollouts", {**ASKED, "takeover": "critic"}, "takeover requires refine"),
    ("generate_rollouts", {**ASKED, "where": "nowhere"}, "there is no machine 'nowhere'"),
    ("generate_rollouts", {**ASKED, "rewards": "sft.jsonl"}, "is not a Python file"),
    ("generate_rollouts", {**ASKED, "judge": "judge.yml"}, "'judge.yml' does not exist"),
    ("generate_rollouts", {**ASKED, "context_file": "a.md"}, "'a.md' does not exist"),
    ("generate_rollouts", {**ASKED, "output": "../x.jsonl"}, "is outside the workspace"),
    ("generate_rollouts", {**ASKED, "max_tokens": 0}, "max_tokens: input should be greater"),
    ("generate_rollouts", {**ASKED, "provider": "gpt"}, "provider: input should be"),
    ("score_rollouts", {"input": "none.jsonl", "output": "x.jsonl"}, "'none.jsonl' does not exist"),
    (
        "sample_for_review",
        {"input": "none.jsonl", "output": "r.jsonl"},
        "'none.jsonl' does not exist",
    ),
    ("filter_dataset", {**FILTERED, "contains": "("}, "contains"),
    ("filter_dataset", {**FILTERED, "max_tokens": 9}, "model"),
    ("filter_dataset", {**FILTERED, "decontaminate": ["none.jsonl"]}, "does not exist"),
    ("filter_dataset", {**FILTERED, "min_reword": 1}, "did you mean 'min_reward'?"),
    ("convert_rollouts", {"input": "sft.jsonl"}, "output is required"),
    ("make_dpo_pairs", {"input": "prompts.jsonl", "output": "p.jsonl"}, "not a rollout row"),
    ("inspect_examples", {"path": "sft.jsonl", "model": "nowhere"}, "there is no model 'nowhere'"),
    ("plan_training", {"config": "rows.yml", "overrides": ["trainer.num_epochs"]}, "num_epochs"),
    (
        "plan_training",
        {"config": "model.yml", "overrides": ["trainer.epochs=2"]},
        "trainer.epochs is not known",
    ),
    (
        "evaluate_model",
        {"data": "prompts.jsonl", "model": "m", "base_url": "http://a/v1", "budget_usd": 1},
        "budget_usd needs the price of 'm'",
    ),
    ("evaluate_model", {**EVALUATED, "guard": "none.jsonl"}, "guard 'none.jsonl' does not exist"),
    ("evaluate_model", {**EVALUATED, "temperature": 3}, "temperature: input should be less"),
    (
        "evaluate_model",
        {**EVALUATED, "model": "m", "base_url": "http://a/v1", "teacher": "demo/teacher"},
        "teacher needs an in-process model",
    ),
    ("export_model", {"model": "demo/student", "output": "o", "verify": 5}, "but there is none"),
    ("export_model", {"model": "Qwen/Qwen3-0.6B", "output": "o"}, "is on the model hub"),
    (
        "export_model",
        {"model": "demo/student", "output": "o", "format": "gguf", "llama_cpp": "prompts.jsonl"},
        "has no convert_hf_to_gguf.py",
    ),
    ("compare_evaluations", {"baseline": "a"}, "set candidates, or the teacher's evaluation"),
    ("compare_evaluations", {"baseline": "a", "teacher": "b"}, "there is no run 'a'"),
    ("get_run", {"run_id": "../x"}, "'../x' is not a run id"),
    (
        "get_run",
        {"run_id": "x", "wait_s": 500},
        "wait_s: input should be less than or equal to 110",
    ),
    ("get_run_logs", {"run_id": "x", "source": "stdout"}, "source: input should be 'log'"),
    ("list_runs", {"limit": 0}, "limit: input should be greater"),
    ("cancel_run", {}, "run_id is required"),
    ("show_lineage", {"path": "none.jsonl"}, "none.jsonl"),
    ("write_report", {"output": "../r.html"}, "is outside the workspace"),
    ("write_report", {"output": "prompts.jsonl"}, "prompts.jsonl"),
    ("get_runs", {}, "unknown tool 'get_runs' (did you mean 'get_run'?)"),
    ("compare_evaluations", {"baseline": "a", "candidates": []}, "candidates"),
    ("compare_evaluations", {"baseline": "a", "candidates": ["b"]}, "there is no run 'a'"),
]


@pytest.fixture
def faulty_project(tmp_path: Path) -> Path:
    good = json.dumps({"messages": [{"role": "user", "content": "a"},
                                    {"role": "assistant", "content": "b"}]})  # fmt: skip
    lines = [good] * 6 + ['{"messages": [', good]
    (tmp_path / "broken.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    prompts = "".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(3))
    (tmp_path / "prompts.jsonl").write_text(prompts, encoding="utf-8")
    (tmp_path / "sft.jsonl").write_text(good + "\n", encoding="utf-8")
    sft = "dataset_type: sft\ndata: {train_file: %s, batch_size: 1}\nmodel: {path: %s}\n"
    trainer = "trainer: {num_epochs: 1}\n"
    configs = {
        "bad.yml": sft % ("sft.jsonl", "demo/student") + "trainer: {num_epoch: 1}\n",
        "rows.yml": sft % ("broken.jsonl", "demo/student") + trainer,
        "model.yml": sft % ("sft.jsonl", "nowhere") + trainer,
        "teacher.yml": "dataset_type: distill\ndata: {train_file: prompts.jsonl, batch_size: 1}\n"
        "model: {path: demo/student}\nteacher: {path: gpt-5-nano}\n" + trainer,
    }
    for name, text in configs.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_bad_input_gets_one_clear_message_and_leaves_nothing_behind(faulty_project: Path) -> None:
    """One client makes all calls, since starting a server takes longer than a call."""

    def files() -> list[Path]:
        return sorted(faulty_project.rglob("*"))

    before = files()
    wrong: list[tuple[str, dict[str, Any], str]] = []

    async def scenario() -> None:
        async with client_of(faulty_project) as client:
            for tool, arguments, expected in BAD_CALLS:
                result = await client.call_tool(tool, arguments)
                text = text_of(result)
                _, _, fix = text.partition("\nfix: ")
                is_clear = expected in text and len(fix.split()) > 2
                is_plain = "pydantic" not in text and "Traceback" not in text
                is_tidy = files() == before
                if not (result.is_error and is_clear and is_plain and is_tidy):
                    wrong.append((tool, arguments, text))

    anyio.run(scenario)
    assert len(BAD_CALLS) >= 60
    assert not wrong, "\n".join(map(str, wrong))


def test_a_list_sent_as_text_is_understood(faulty_project: Path) -> None:
    async def scenario() -> Any:
        async with client_of(faulty_project) as client:
            arguments = {"config": "bad.yml", "overrides": '["trainer.num_epochs=x"]'}
            return await client.call_tool("start_training", arguments)

    assert "trainer.num_epochs" in text_of(anyio.run(scenario))


def test_a_rollout_run_is_started_watched_and_listed(tmp_path: Path) -> None:
    endpoint_project(tmp_path, num_prompts=6)

    async def scenario(base_url: str) -> None:
        async with client_of(tmp_path) as client:
            arguments = {
                "input": "prompts.jsonl",
                "provider": "openai",
                "base_url": base_url,
                "model": "scripted",
                "tools": "tools.py",
            }
            started = await client.call_tool("generate_rollouts", arguments)
            run = started.structured_content
            assert not started.is_error, text_of(started)
            assert run["status"] in ("starting", "running", "succeeded")
            assert run["next_step"]
            heard: list[float] = []

            async def on_progress(done: float, total: float | None, message: str | None) -> None:
                heard.append(done)

            requested = {"run_id": run["run_id"], "wait_s": 110}
            ended = await client.call_tool("get_run", requested, progress_callback=on_progress)
            assert ended.structured_content["status"] == "succeeded", text_of(ended)
            assert ended.structured_content["result"]["rewarded"] == 6
            assert ended.structured_content["poll_after_s"] is None
            assert "filter_dataset" in ended.structured_content["next_step"]
            listed = await client.call_tool("list_runs", {})
            assert [r["run_id"] for r in listed.structured_content["runs"]] == [run["run_id"]]
            logs = await client.call_tool("get_run_logs", {"run_id": run["run_id"]})
            assert not logs.is_error

    with ScriptedEndpoint(latency_s=0.05) as endpoint:
        anyio.run(scenario, endpoint.base_url)


def test_the_server_process_loads_no_heavy_library(tmp_path: Path) -> None:
    script = (
        "import sys, stillroom.api, stillroom_mcp.cli, stillroom_mcp.app\n"
        "from stillroom.settings import open_workspace\n"
        "stillroom_mcp.app.build_server(open_workspace())\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    finished = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True,
        cwd=tmp_path,
    )  # fmt: skip
    assert finished.stdout.strip() == "[]"


def test_it_speaks_over_stdio_from_a_folder_with_modules_of_the_same_names(tmp_path: Path) -> None:
    for name in ("server", "engine", "mcp", "stillroom", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')\n", encoding="utf-8")

    async def scenario() -> int:
        server = StdioServerParameters(
            command=sys.executable,
            args=["-P", "-m", "stillroom_mcp", "serve", "--workspace", str(tmp_path)],
            cwd=tmp_path,
        )
        with anyio.fail_after(60):
            async with Client(server) as client:
                return len((await client.list_tools()).tools)

    assert anyio.run(scenario) == len(OPERATIONS)
