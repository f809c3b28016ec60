"""Which runs an evaluation looks at for the answers of an unfinished one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.projects import endpoint_project
from stillroom.evaluate.request import EvaluateModel, plan_evaluation
from stillroom.evaluate.unfinished import answers_folder, take_over_answers
from stillroom.lineage import ModelRecord
from stillroom.rollout.results import RolloutOrigin
from stillroom.run_folder import RunFolder
from stillroom.settings import Workspace

ORIGIN = RolloutOrigin([], [ModelRecord(role="policy", name="scripted", location="http://a/v1")])

TakeOver = Callable[[], str | None]


def prepared(root: Path, origin: RolloutOrigin, **model: Any) -> TakeOver:
    """Returns what looks for answers for an evaluation; the run `with` has some, `without` none."""
    endpoint_project(root, num_prompts=1)
    (root / "prices.yml").write_text("scripted: {input: 1, output: 1}\n", "utf-8")
    workspace = Workspace(root)
    plan = plan_evaluation(workspace, EvaluateModel(data="prompts.jsonl", **model))
    for name in ("with", "without", "new"):
        (workspace.runs / name).mkdir(parents=True)
        (workspace.runs / name / "run.json").touch()
    answers = workspace.runs / "with" / answers_folder(plan, origin)
    answers.mkdir()
    (answers / "main.jsonl").write_text("{}\n", "utf-8")
    return lambda: take_over_answers(workspace, workspace.runs / "new", plan, origin)


@pytest.fixture
def take_over(tmp_path: Path) -> TakeOver:
    return prepared(tmp_path, ORIGIN, model="scripted", base_url="http://a/v1")


@pytest.mark.parametrize(("revision", "taken"), [("4f2a", "with"), (None, None)])
def test_answers_of_an_adapter_are_taken_only_if_the_commit_of_its_base_is_known(
    tmp_path: Path, revision: str | None, taken: str | None
) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}", "utf-8")
    models = [
        ModelRecord(role="policy", name="adapter", location="/adapter", sha256="ab"),
        ModelRecord(role="base", name="org/base", location="org/base", revision=revision),
    ]
    take_over = prepared(tmp_path, RolloutOrigin([], models), model="adapter", provider="hf")
    assert take_over() == taken


def test_answers_of_a_running_evaluation_are_not_taken_and_no_other_run_is_locked(
    take_over: TakeOver, tmp_path: Path
) -> None:
    owner = RunFolder(tmp_path / "runs" / "with").owner_lock()
    assert owner.try_acquire()
    assert take_over() is None
    # A run that finds its lock held when it starts takes the holder for its own process, and ends.
    locked = [file.parent.name for file in (tmp_path / "runs").glob("*/owner.lock")]
    assert locked == ["with"]

    owner.release()
    assert take_over() == "with"


def test_answers_that_are_deleted_while_they_are_looked_at_are_not_taken(
    take_over: TakeOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deleted(_path: Path, _pattern: str) -> Iterator[Path]:
        raise FileNotFoundError("the evaluation has finished")

    monkeypatch.setattr(Path, "rglob", deleted)
    assert take_over() is None
