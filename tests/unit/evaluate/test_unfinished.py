"""Which runs an evaluation looks at for the answers of an unfinished one."""

from collections.abc import Callable, Iterator
from pathlib import Path

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


@pytest.fixture
def take_over(tmp_path: Path) -> TakeOver:
    """Looks for answers for an evaluation; the run `with` has some, and `without` has none."""
    endpoint_project(tmp_path, num_prompts=1)
    (tmp_path / "prices.yml").write_text("scripted: {input: 1, output: 1}\n", "utf-8")
    workspace = Workspace(tmp_path)
    request = EvaluateModel(data="prompts.jsonl", model="scripted", base_url="http://a/v1")
    plan = plan_evaluation(workspace, request)
    for name in ("with", "without", "new"):
        (workspace.runs / name).mkdir(parents=True)
        (workspace.runs / name / "run.json").touch()
    answers = workspace.runs / "with" / answers_folder(plan, ORIGIN)
    answers.mkdir()
    (answers / "main.jsonl").write_text("{}\n", "utf-8")
    return lambda: take_over_answers(workspace, workspace.runs / "new", plan, ORIGIN)


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
