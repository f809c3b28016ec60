"""Has Harbor write trajectories: of the sessions of two agents, and one of every kind of step.

`PYTHONPATH=scripts python -m trace_samples.make_atif`; needs harbor, and the samples of Claude Code
and Codex.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from harbor.agents.installed.claude_code import ClaudeCode
from harbor.agents.installed.codex import Codex
from harbor.models.trajectories import (
    Agent,
    ContentPart,
    ImageSource,
    Metrics,
    Observation,
    ObservationResult,
    Step,
    SubagentTrajectoryRef,
    ToolCall,
    Trajectory,
)

from trace_samples.conversation import CALLS, MODEL, REPLIES, RESULTS, SYSTEM, tool_schemas
from trace_samples.seen import SAMPLES

_FOLDER = SAMPLES / "atif"


def _write(name: str, trajectory: Any) -> None:
    text = json.dumps(trajectory.to_json_dict(), ensure_ascii=False, indent=1)
    (_FOLDER / name).write_text(text + "\n", encoding="utf-8")


def _converted(agent: Any, sample: str, inner: str) -> Any:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "sessions" / inner
        folder.mkdir(parents=True)
        shutil.copy(SAMPLES / sample, folder)
        return agent(logs_dir=Path(scratch), model_name=MODEL).convert_trajectory(Path(scratch))


def _metrics(number: int) -> Metrics:
    reply = REPLIES[number]
    return Metrics(
        prompt_tokens=reply.prompt_tokens,
        completion_tokens=reply.completion_tokens,
        cached_tokens=reply.cached_tokens,
        cost_usd=0.5,
    )


def _of_every_kind() -> Trajectory:
    """Returns the samples' conversation with a copied step, an image and a sub-agent."""
    calls = [
        ToolCall(tool_call_id=call.id, function_name=call.name, arguments=call.arguments)
        for call in CALLS
    ]
    results = [
        ObservationResult(source_call_id=call.id, content=result)
        for call, result in zip(CALLS, RESULTS, strict=True)
    ]
    image = ImageSource(media_type="image/png", path="images/lamp.png")
    parts = [ContentPart(type="text", text="This one?"), ContentPart(type="image", source=image)]
    reference = SubagentTrajectoryRef(trajectory_id="helper")
    handed = ObservationResult(content="30", subagent_trajectory_ref=[reference])
    steps = [
        Step(step_id=1, source="system", message=SYSTEM),
        Step(step_id=2, source="agent", message="Earlier.", is_copied_context=True),
        Step(step_id=3, source="user", message=parts),
        Step(
            step_id=4,
            timestamp="2026-03-01T10:00:00Z",
            source="agent",
            message=REPLIES[0].text,
            reasoning_content=REPLIES[0].reasoning,
            tool_calls=calls,
            observation=Observation(results=results),
            metrics=_metrics(0),
        ),
        Step(
            step_id=5,
            source="agent",
            message="ls",
            observation=Observation(results=[handed]),
            metrics=_metrics(1),
        ),
        Step(step_id=6, source="agent", message="done", llm_call_count=0),
    ]
    agent = Agent(name="shop", version="1", model_name=MODEL, tool_definitions=tool_schemas())
    helper = Trajectory(
        trajectory_id="helper",
        agent=Agent(name="helper", version="1", model_name="helper-1"),
        steps=[
            Step(step_id=1, source="user", message="The chair?"),
            Step(step_id=2, source="agent", message="30"),
        ],
    )
    return Trajectory(session_id="run", agent=agent, steps=steps, subagent_trajectories=[helper])


def main() -> None:
    """Writes the three trajectories."""
    shutil.rmtree(_FOLDER, ignore_errors=True)
    _FOLDER.mkdir(parents=True)
    claude_code = _converted(ClaudeCode, "claude_code/session.jsonl", "projects/-project")
    _write("claude_code.json", claude_code)
    _write("codex.json", _converted(Codex, "codex/rollout-thread.jsonl", "2026/11/23"))
    _write("every_kind.json", _of_every_kind())


if __name__ == "__main__":
    main()
