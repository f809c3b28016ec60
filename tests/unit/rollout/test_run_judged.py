"""Whole rollout runs with a judging model: what it is paid is on record, once, and in the rows."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from fakes.chat_endpoint import ScriptedTeacher, completion
from fakes.judges import judgement
from fakes.reporters import KeptReporter
from fakes.rollout_rows import read_rows, write_rows
from fakes.rollout_runs import PowerCutError, run_rollouts
from stillroom.rollout.results import RolloutsResult
from stillroom.settings import Workspace
from stillroom.types import Usage

NUM_PROMPTS = 3
JUDGE = {"model": "j", "base_url": "http://judge.test/v1", "rubric": "Be right."}
OUTPUT = Path("rollouts") / "out.jsonl"
JOURNAL = Path("rollouts") / ".out.jsonl" / "journal.jsonl"
# A teacher's call takes 10 + 5 tokens, a judge's 100 + 7.
TEACHER_USD, JUDGE_USD = 0.00007, 0.000807


class Served:
    """A teacher and a judge; `served` has whose call was answered, in their order.

    The judge's first reply to each conversation can't be read. Before call `cut_at` the power goes.
    `judges` is the model of each conversation's judge, as the endpoint says it.
    """

    def __init__(
        self,
        *,
        cut_at: int | None = None,
        judges: Mapping[str, str] | None = None,
    ) -> None:
        self._judges = judges or {}
        self.teacher = ScriptedTeacher()
        self.served: list[str] = []
        self._cut_at = cut_at
        self._is_cut = False

    async def handle(self, request: httpx.Request) -> httpx.Response:
        if len(self.served) == self._cut_at:
            if self._is_cut:
                # Two requests may arrive at the cut, and a power cut happens once.
                await anyio.sleep_forever()
            self._is_cut = True
            raise PowerCutError
        is_judge = request.url.host == "judge.test"
        messages = json.loads(request.content)["messages"]
        self.served.append("judge" if is_judge else "teacher")
        if not is_judge:
            return await self.teacher.handle(request)
        usage = {"prompt_tokens": 100, "completion_tokens": 7}
        about = [name for prompt, name in self._judges.items() if prompt in messages[1]["content"]]
        reported = {"model": about[0]} if about else {}
        text = judgement(0.75) if len(messages) > 2 else "Well"
        return completion(text, usage=usage, reported=reported)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    root = tmp_path / "workspace"
    write_rows(root / "prompts.jsonl", [{"prompt": f"prompt {i}"} for i in range(NUM_PROMPTS)])
    (root / "judge.yml").write_text(json.dumps(JUDGE), encoding="utf-8")
    prices = {"m": {"input": 2, "output": 10}, "j": {"input": 8, "output": 1}}
    (root / "prices.yml").write_text(json.dumps(prices), encoding="utf-8")
    return Workspace(root)


def run_of(workspace: Workspace, endpoint: Served, *options: Any, **changes: Any) -> RolloutsResult:
    given = {"output": str(OUTPUT), "judge": "judge.yml", "max_concurrency": 1, "seed": 7}
    return run_rollouts(workspace, endpoint.handle, *options, **{**given, **changes})


def rows_of(workspace: Workspace) -> list[dict[str, Any]]:
    return read_rows(workspace.root / OUTPUT)


def price_of(served: list[str]) -> float:
    return sum(JUDGE_USD if who == "judge" else TEACHER_USD for who in served)


def tokens_of(served: list[str]) -> int:
    return sum(107 if who == "judge" else 15 for who in served)


def tokens_in(row: dict[str, Any]) -> int:
    parts = [row, row["judge"] or {}, row["dropped"] or {}]
    return sum(sum(part.get("usage", {}).values()) for part in parts)


def test_a_row_tells_what_its_judge_took_and_the_rows_add_up_to_the_run(
    workspace: Workspace,
) -> None:
    endpoint = Served()

    result = run_of(workspace, endpoint)

    rows = rows_of(workspace)
    assert [row["rewards"] for row in rows] == [{"judge": 0.75}] * NUM_PROMPTS
    for row in rows:
        assert row["judge"] == {
            "calls": 2,
            "usage": {"prompt_tokens": 200, "completion_tokens": 14},
            "cost_usd": pytest.approx(2 * JUDGE_USD),
            "answered_by": [],
        }
        assert row["usage"] == {"prompt_tokens": 20, "completion_tokens": 10}
        assert row["cost_usd"] == pytest.approx(2 * TEACHER_USD + 2 * JUDGE_USD)
        assert row["dropped"] is None
    assert result.calls == len(endpoint.served) == 4 * NUM_PROMPTS
    assert result.usage == Usage(prompt_tokens=220 * 3, completion_tokens=24 * 3)
    assert result.cost_usd == pytest.approx(price_of(endpoint.served))
    assert sum(row["cost_usd"] for row in rows) == pytest.approx(result.cost_usd)


def test_rows_and_manifest_say_which_model_judged_and_a_change_is_told(
    workspace: Workspace,
) -> None:
    judges = {"prompt 0": "j-2026-05", "prompt 1": "j-2026-09", "prompt 2": "j-2026-09"}
    reporter = KeptReporter()

    run_of(workspace, Served(judges=judges), reporter)

    by_prompt = {
        row["messages"][0]["content"]: row["judge"]["answered_by"] for row in rows_of(workspace)
    }
    assert by_prompt == {
        prompt: [{"model": name, "fingerprint": None}] for prompt, name in judges.items()
    }
    manifest = json.loads((workspace.root / f"{OUTPUT}.manifest.json").read_bytes())
    _policy, judge = manifest["models"]
    assert (judge["role"], judge["name"], judge["location"]) == ("judge", "j", JUDGE["base_url"])
    assert [(one["model"], one["rows"]) for one in judge["answered_by"]] == [
        ("j-2026-09", 2),
        ("j-2026-05", 1),
    ]
    first, second = reporter.notes
    assert first == "the endpoint reports 'j-2026-05' for the requested model 'j'"
    assert "'j-2026-09' (before: j-2026-05); see answered_by in the judge field" in second


@pytest.mark.parametrize("cut_at", [0, 1, 2, 3, 4, 4 * NUM_PROMPTS - 1])
def test_after_a_cut_at_any_call_no_call_of_the_judge_is_made_again(
    workspace: Workspace, tmp_path: Path, cut_at: int
) -> None:
    whole = Served()
    run_of(Workspace(shutil.copytree(workspace.root, tmp_path / "whole")), whole)
    first, second = Served(cut_at=cut_at), Served()

    with pytest.RaisesGroup(PowerCutError, flatten_subgroups=True):
        run_of(workspace, first)
    result = run_of(workspace, second)

    assert first.served + second.served == whole.served
    assert result.calls == len(second.served)
    assert result.cost_usd == pytest.approx(price_of(second.served))
    rows = rows_of(workspace)
    unbroken = read_rows(tmp_path / "whole" / OUTPUT)
    compared = ("messages", "reward", "usage", "cost_usd", "judge", "dropped")
    assert [[row[n] for n in compared] for row in rows] == [
        [row[n] for n in compared] for row in unbroken
    ]
    assert sum(map(tokens_in, rows)) == tokens_of(whole.served)


def test_a_verdict_whose_row_was_lost_is_not_paid_for_again(workspace: Workspace) -> None:
    with pytest.RaisesGroup(PowerCutError, flatten_subgroups=True):
        run_of(workspace, Served(cut_at=4))
    # The last byte of the row never reached the disk.
    torn = (workspace.root / OUTPUT).read_bytes()[:-1]
    (workspace.root / OUTPUT).write_bytes(torn)
    second = Served()

    run_of(workspace, second, n=1)

    assert second.served == []
    assert [row["judge"]["calls"] for row in rows_of(workspace)] == [2]


def test_what_an_unfinished_rollouts_judge_was_paid_counts_in_the_budget(
    workspace: Workspace,
) -> None:
    with pytest.RaisesGroup(PowerCutError, flatten_subgroups=True):
        run_of(workspace, Served(cut_at=3))
    # Two calls of the teacher and one of the judge are on record: no other call can be paid.
    spent = 2 * TEACHER_USD + JUDGE_USD
    second = Served()

    result = run_of(workspace, second, budget_usd=spent + TEACHER_USD / 10)

    assert (result.stopped_by, second.served) == ("budget_usd", [])


def test_a_judge_that_gave_up_is_asked_anew_and_all_it_was_paid_is_in_the_row(
    workspace: Workspace,
) -> None:
    class Mumbling(Served):
        async def handle(self, request: httpx.Request) -> httpx.Response:
            response = await super().handle(request)
            if request.url.host == "judge.test":
                usage = {"prompt_tokens": 100, "completion_tokens": 7}
                return completion("Hm", usage=usage)
            return response

    failed = run_of(workspace, Mumbling(), n=1)
    assert failed.failed_by_class == {"reward": 1}
    second = Served()

    result = run_of(workspace, second, n=1)

    assert second.served == ["judge"] * 2
    [row] = rows_of(workspace)
    assert (row["reward"], row["judge"]["calls"]) == (0.75, 5)
    assert row["cost_usd"] == pytest.approx(failed.cost_usd + result.cost_usd)
    assert not (workspace.root / JOURNAL).exists()


def test_where_no_judge_is_asked_the_row_says_so(workspace: Workspace) -> None:
    run_of(workspace, Served(), judge="none")

    assert [row["judge"] for row in rows_of(workspace)] == [None] * NUM_PROMPTS
