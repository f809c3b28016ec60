"""The budget of a workspace, which all of its runs share."""

from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from fakes.run_folders import write_run
from stillroom.api.placement import pack_job
from stillroom.api.spending import limit_budget, within_workspace_budget
from stillroom.api.start_runs import generate_rollouts
from stillroom.errors import DocumentError, InputError
from stillroom.files import write_json
from stillroom.jobs import supervise
from stillroom.remote.bundle.needs import Needs
from stillroom.remote.machines import find_machine
from stillroom.rollout.plan import plan_generation
from stillroom.rollout.request import GenerateRollouts
from stillroom.run_folder import RunFolder, RunState, create_run
from stillroom.settings import Workspace
from stillroom.types import RunKind

PRICES = """big: {input: 3, output: 15}
own: {input: 0, output: 0}
workspace: {budget_usd: 2}
"""


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.setenv("VLLM_API_KEY", "key")
    (tmp_path / "prices.yml").write_text(PRICES, encoding="utf-8")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "How much?"}\n', encoding="utf-8")
    return Workspace(tmp_path)


def spent(workspace: Workspace, run_id: str, *, asked: dict[str, Any], **fields: Any) -> Path:
    run = write_run(workspace.runs, run_id, **fields)
    document = {"kind": run_id.split("-", maxsplit=1)[0], "workspace": "/w", "request": asked}
    write_json(run / "request.json", document)
    return run


def limited(workspace: Workspace, **changes: Any) -> tuple[float | None, str]:
    fields = {"input": "prompts.jsonl", "output": "new.jsonl", "provider": "openai", **changes}
    request = GenerateRollouts.model_validate(fields)
    plan = plan_generation(workspace, request)
    request, notes = within_workspace_budget(workspace, request, plan.rollouts)
    return request.budget_usd, " ".join(notes)


CALLED = {"model": "big", "base_url": "http://127.0.0.1:9/v1"}


def test_each_run_gets_at_most_what_the_others_leave(workspace: Workspace) -> None:
    assert limited(workspace, **CALLED, budget_usd=1.5) == (1.5, "")
    budget, note = limited(workspace, **CALLED)
    assert budget == 2
    assert "$0 of the $2 that the workspace's runs may cost together" in note

    ended = {"cost_usd": 0.4, "unconfirmed_usd": 0.1}
    spent(workspace, "rollouts-a", asked={"output": "new.jsonl"}, result=ended)
    active = spent(workspace, "evaluate-b", asked={"budget_usd": 0.3}, status="running")
    owner = RunFolder(active).owner_lock()
    assert owner.try_acquire()
    # Its stages are the runs above.
    spent(workspace, "recipe-c", asked={"budget_usd": 2}, status="running")

    assert limited(workspace, **CALLED, output="other.jsonl")[0] == pytest.approx(1.2)
    assert limited(workspace, **CALLED, budget_usd=1) == (1, "")
    assert limit_budget(workspace, None, num_runs=2)[0] == pytest.approx(0.6)

    # One whose process is gone has no more to spend; a damaged one may have spent all.
    owner.release()
    assert limit_budget(workspace, None)[0] == pytest.approx(1.5)
    (active / "run.json").write_text("{", encoding="utf-8")
    assert limit_budget(workspace, None)[0] == pytest.approx(1.2)


def test_two_starts_in_one_moment_share_what_is_left(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    others, budgets = list[Thread](), list[float]()

    def start(name: str) -> None:
        fields = {"input": "prompts.jsonl", "output": name, "provider": "openai", **CALLED}
        asked = GenerateRollouts.model_validate({**fields, "budget_usd": 1.5})
        generate_rollouts(workspace, asked)

    def start_run(
        place: Workspace, kind: RunKind, request: dict[str, Any], **_: object
    ) -> RunState:
        """Creates the run, but lets another start try to come in between before that."""
        if not others:
            others.append(Thread(target=start, args=("other.jsonl",), daemon=True))
            others[0].start()
            others[0].join(0.3)
        budgets.append(request["budget_usd"])
        return create_run(place, kind, request).read()

    monkeypatch.setattr(supervise, "start_run", start_run)
    start("new.jsonl")
    others[0].join(60)
    assert not others[0].is_alive()
    assert budgets == [1.5, pytest.approx(0.5)]


def test_nothing_that_may_cost_money_starts_once_it_is_spent(workspace: Workspace) -> None:
    spent(workspace, "rollouts-a", asked={"output": "new.jsonl"}, metrics={"cost_usd": 2.0})
    with pytest.raises(InputError, match=r"have used or reserved \$2.00 of the \$2"):
        limited(workspace, **CALLED)
    for free in (
        {"model": "own", "base_url": "http://127.0.0.1:9/v1"},
        {"model": "teacher", "provider": "demo"},
        {**CALLED, "dry_run": True},
    ):
        assert limited(workspace, **free) == (None, "")


def test_a_price_must_be_known(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    with pytest.raises(InputError, match="needs the price of 'unheard-of'"):
        limited(workspace, model="unheard-of")


def test_machines_count(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STILLROOM_CONFIG", str(workspace.root))
    machines = "box: {ssh: me@gpu.test, price_per_hour: 2}\nown: {ssh: me@own.test}\n"
    (workspace.root / "machines.yml").write_text(machines, encoding="utf-8")

    def budget(name: str) -> float | None:
        job = pack_job(workspace, find_machine(workspace, name), Needs, budget_usd=None)
        assert job is not None
        return job.spec.budget_usd

    assert (budget("box"), budget("own")) == (2, None)


@pytest.mark.parametrize("entry", ["20", "{usd: 20}", "{budget_usd: -1}", "{budget_usd: x}"])
def test_a_faulty_budget_is_refused(workspace: Workspace, entry: str) -> None:
    (workspace.root / "prices.yml").write_text(f"workspace: {entry}\n", encoding="utf-8")
    with pytest.raises(DocumentError, match=r"prices\.yml"):
        limited(workspace, **CALLED)
