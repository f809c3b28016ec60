"""A training that learns nothing fails, or its alarms or its next step say so: every way.

Those of the other operations are in tests/unit/api/test_nothing_done.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fakes.conversations import answer, user
from fakes.tiny_models import TinyModels
from fakes.training import Project, make_project
from stillroom import api
from stillroom.errors import EngineError
from stillroom.types import RunKind, RunStatus
from stillroom_mcp.next_steps import after_run

ROW = {"messages": [user("Price of a lamp?"), answer("It costs 12.")]}
LONG = {"messages": [user("Price of a lamp?"), answer("It costs 12. " * 99)]}
UNTRAINED = {"messages": [user("?"), {**answer("It costs 12."), "weight": 0}]}
PAIR = {
    "prompt": [user("Price of a lamp?")],
    "chosen": [answer("It costs 12.")],
    "rejected": [answer("No idea.")],
}
SAME = {**PAIR, "rejected": PAIR["chosen"]}
TOO_LONG = {**PAIR, "chosen": [answer("12 " * 99)]}
BROKEN_TOOL = "from stillroom.tools import tool\n\n@tool\ndef price(item: str) -> str\n"
BROKEN_REWARD = (
    "from stillroom.tools import reward\n\n"
    '@reward\ndef right(args, messages):\n    raise KeyError("lamp")\n'
)
ON_POLICY = {"data": {"batch_size": 2}, "rollout": {"max_tokens": 8, "max_turns": 1}}


def trained(method: str, *rows: Any, seed: int = 1, files: Any = None, **sections: Any) -> Any:
    """A case: trains on the rows, and returns what the agent is told when the run has ended."""

    def case(root: Path, models: TinyModels) -> str:
        student = models.folder("llama", "chatml")
        if method == "distill":
            sections["teacher"] = {"path": str(models.folder("llama", "chatml", seed=seed))}
        project = make_project(root, method, student, **sections)
        project.write(rows)
        for name, text in (files or {}).items():
            (root / name).write_text(text, encoding="utf-8")
        return ending(project, method)

    return case


def ending(project: Project, method: str) -> str:
    result = project.train()
    report = api.RunReport(
        run_id="r",
        kind=RunKind(method),
        status=RunStatus.SUCCEEDED,
        created_at="",
        started_at="",
        ended_at="",
        progress=None,
        metrics={},
        alarms=project.reporter.alarmed[-1],
        notes=[],
        error=None,
        folder="",
        log_path="",
        result=msgspec.to_builtins(result),
    )
    return " ".join([*report.alarms, after_run(None, report)])


def resumed_when_finished(root: Path, models: TinyModels) -> str:
    project = make_project(root, "sft", models.folder("llama", "chatml"))
    project.write([ROW] * 4)
    project.train()
    project.train("run-2", resume="run-1")
    return ""


PROMPTS = [{"prompt": f"Price of item {n}?"} for n in range(2)]
WAYS: dict[str, tuple[Callable[[Path, TinyModels], str], str]] = {
    "sft: no rows": (trained("sft"), "has no rows"),
    "sft: all rows are too long": (
        trained("sft", LONG, model={"max_length": 32}),
        "all rows were skipped: 1 × longer than max_length 32",
    ),
    "sft: no token is trained": (
        trained("sft", UNTRAINED),
        "no trained turn: all assistant messages have weight 0",
    ),
    "sft: most rows are left out": (
        trained("sft", ROW, *[LONG] * 3, model={"max_length": 64}),
        "tell the user that 3 of 4 rows were left out",
    ),
    "sft: the run is finished already": (resumed_when_finished, "no checkpoint to resume from"),
    "dpo: no pairs": (trained("dpo"), "has no rows"),
    "dpo: all pairs are too long": (
        trained("dpo", TOO_LONG, model={"max_length": 32}),
        "all rows were skipped",
    ),
    "dpo: a pair is of one answer": (trained("dpo", PAIR, SAME), "rejected is the same as chosen"),
    "dpo: most pairs are left out": (
        trained("dpo", PAIR, TOO_LONG, TOO_LONG, model={"max_length": 64}),
        "tell the user that 2 of 3 rows were left out",
    ),
    "distill: no prompts": (trained("distill", **ON_POLICY), "has no rows"),
    "distill: the teacher is the student": (
        trained("distill", *PROMPTS, seed=0, **ON_POLICY),
        "no_gradient: the gradient of the last 1 steps was zero",
    ),
    "distill: the tools cannot be loaded": (
        trained("distill", *PROMPTS, files={"tools.py": BROKEN_TOOL}, **ON_POLICY),
        "tools.py",
    ),
    "distill: every rollout fails": (
        trained(
            "distill",
            *({**row, "rewards": ["right"]} for row in PROMPTS),
            files={"rewards.py": BROKEN_REWARD},
            **ON_POLICY,
        ),
        "right",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_training_that_learns_nothing_fails_or_says_so(
    tmp_path: Path, tiny_models: TinyModels, way: str
) -> None:
    case, text = WAYS[way]

    try:
        said = case(tmp_path, tiny_models)
    except EngineError as error:
        said = error.problem

    assert text in said
