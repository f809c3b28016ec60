"""Run folders as finished runs leave them, written file by file."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stillroom.evaluate.files import Evaluation, EvaluationResult
from stillroom.evaluate.intervals import Estimate
from stillroom.evaluate.scores import accuracy_of, score_tasks
from stillroom.files import write_json
from stillroom.rollout.journal.journal import RolloutStore
from stillroom.run_folder import WorkspaceShare
from stillroom.settings import Workspace
from stillroom.teachers.budget import Cost
from stillroom.types import (
    SamplingSettings,
    StopReason,
    TeacherRecord,
    Trajectory,
    Usage,
)

GROUP_FIELDS = ("difficulty", "task_type")
TASK_TYPES = ("sum", "price", "budget")


def write_run(
    runs: Path, run_id: str, *, minute: int = 0, status: str = "succeeded", **fields: Any
) -> Path:
    """Writes run.json; the run's kind is what its id begins with."""
    stamp = f"2026-11-20T10:{minute:02d}:00.000Z"
    state = {
        "run_id": run_id,
        "kind": run_id.split("-", maxsplit=1)[0],
        "status": status,
        "created_at": stamp,
        "started_at": stamp,
        "ended_at": None if status == "running" else stamp.replace("00.000", "30.500"),
        **fields,
    }
    write_json(runs / run_id / "run.json", state)
    return runs / run_id


def spent_run(
    workspace: Workspace,
    run_id: str,
    *,
    asked: dict[str, Any],
    share: WorkspaceShare | None = None,
    **fields: Any,
) -> Path:
    """Writes run.json and request.json of a run that is newer than those before it."""
    minute = len(list(workspace.runs.glob("*")))
    run = write_run(workspace.runs, run_id, minute=minute, **fields)
    kind = run_id.split("-", maxsplit=1)[0]
    document = {"kind": kind, "workspace": "/w", "request": asked, "share": share}
    write_json(run / "request.json", document)
    return run


def record_cost(output: Path, usd: float) -> None:
    """Leaves an output as rollouts that have cost this much leave it if they are interrupted."""
    store = RolloutStore(output, {})
    store.record_unconfirmed(Cost(usd=usd))
    store.close(is_complete=False)


def write_training(
    runs: Path,
    run_id: str,
    metrics: Sequence[Mapping[str, float | None]],
    *,
    minute: int = 0,
    status: str = "succeeded",
    teacher: str | None = None,
) -> Path:
    """Writes a training run whose step 1, 2, … recorded the given metrics."""
    result = {"steps": len(metrics), "rows": 280, "metrics": metrics[-1] if metrics else {}}
    folder = write_run(runs, run_id, minute=minute, status=status, result=result)
    config = {
        "data": {"train_file": "rows.jsonl", "batch_size": 8},
        "model": {"path": "base", "max_length": None},
        "teacher": {"path": teacher} if teacher else None,
        "trainer": {"learning_rate": 0.0002},
    }
    write_json(folder / "config.json", config)
    events = [
        {"time": "2026-11-20T10:00:00Z", "event": "metrics", "step": step, "values": values}
        for step, values in enumerate(metrics, start=1)
    ]
    text = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "events.jsonl").write_text(text, encoding="utf-8")
    return folder


def answer(index: int, *, is_right: bool, said: str = "The answer is 4.", **metadata: Any) -> Any:
    """A rollout that calls a tool, is told of an error, and answers."""
    call = {"id": "c", "type": "function", "function": {"name": "sum", "arguments": '{"a": 2}'}}
    kinds = {
        "difficulty": "hard" if index % 2 else "easy",
        "task_type": TASK_TYPES[index % len(TASK_TYPES)],
        "expected_answer": "4",
    }
    return Trajectory(
        id=f"task{index}-0",
        task_id=f"task{index}",
        sample=0,
        messages=[
            {"role": "system", "content": "You add."},
            {"role": "user", "content": f"Question {index}?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "name": "sum", "content": "error: no b"},
            {"role": "assistant", "content": said},
        ],
        tools=[],
        metadata={**kinds, **metadata},
        reward=float(is_right),
        rewards={},
        success=is_right,
        stop_reason=StopReason.ANSWERED,
        turns=2,
        truncated=False,
        tool_errors=1,
        error=None,
        usage=Usage(),
        cost_usd=None,
        teacher=TeacherRecord(provider="hf", model="m", settings=SamplingSettings()),
        started_at="2026-11-20T10:00:00Z",
        duration_s=0.1,
    )


def write_evaluation(
    runs: Path, run_id: str, rollouts: Sequence[Trajectory], *, minute: int = 0, **fields: Any
) -> Path:
    """Writes an evaluation run; `fields` replace those of its result."""
    scores = score_tasks(rollouts, GROUP_FIELDS)
    by_group = {
        field: {
            value: accuracy_of([s for s in scores if s.groups[field] == value])
            for value in {score.groups[field] for score in scores}
        }
        for field in GROUP_FIELDS
    }
    result = evaluation_result(
        fields.pop("name", fields.get("model", "base")),
        accuracy_of(scores),
        model=fields.pop("model", "base"),
        data=fields.pop("data", "heldout.jsonl"),
        by_group=by_group,
        mean_reward=0.5,
        mean_turns=2.0,
        tool_errors=1,
        teacher=fields.pop("teacher", None),
        teacher_kl=fields.pop("teacher_kl", None),
        rollouts=f"runs/{run_id}/rollouts.jsonl",
        **fields.pop("measured", {}),
    )
    folder = write_run(runs, run_id, minute=minute, result=msgspec.to_builtins(result), **fields)
    write_json(folder / "evaluation.json", Evaluation(result=result, tasks=scores))
    lines = b"".join(msgspec.json.encode(rollout) + b"\n" for rollout in rollouts)
    (folder / "rollouts.jsonl").write_bytes(lines)
    return folder


def evaluate(
    runs: Path,
    model: str,
    right: Collection[int],
    *,
    minute: int,
    total: int = 30,
    **fields: Any,
) -> Path:
    """Writes an evaluation of a model that gets the tasks `right` right, of `total`."""
    rows = [answer(i, is_right=i in right, said=f"{model} says {i}") for i in range(total)]
    return write_evaluation(runs, f"evaluate-{model}", rows, minute=minute, model=model, **fields)


def evaluation_result(name: str, accuracy: Estimate, **fields: Any) -> EvaluationResult:
    """The result of an evaluation; `fields` are those that matter to a test."""
    plain: dict[str, Any] = {
        "model": name,
        "data": "heldout.jsonl",
        "by_group": {},
        "mean_reward": 0.0,
        "mean_turns": 1.0,
        "tool_errors": 0,
        "truncated": 0,
        "failed": 0,
        "teacher": None,
        "teacher_kl": None,
        "rollouts": "r.jsonl",
        "seconds": 1.0,
    }
    return EvaluationResult(name=name, accuracy=accuracy, **(plain | fields))
