"""model.path as a list: one run for each model, one after the other."""

import json

import msgspec
import pytest

from fakes.conversations import answer, user
from fakes.started_runs import ended, report
from fakes.training import Project, make_project
from fakes.waiting import wait_until
from stillroom import api
from stillroom.errors import ConfigError, EngineError
from stillroom.jobs.supervise import start_run
from stillroom.run_folder import NewRun, StartAfter, create_run, find_run, given_config
from stillroom.secrecy.environments import run_environment
from stillroom.train.config.request import requests_per_model
from stillroom.train.planning.forecast import (
    TrainingForecast,
    combined_forecast,
)
from stillroom.types import RunKind, RunStatus

ROWS = [{"messages": [user(f"Item {i}?"), answer(f"It costs {i}.")]} for i in range(8)]


@pytest.fixture
def project(tmp_path, tiny_models) -> Project:
    models = [str(tiny_models.folder("llama", "chatml", seed=seed)) for seed in (0, 1, 2)]
    project = make_project(tmp_path, "sft", tiny_models.folder("llama", "chatml"))
    project.write(ROWS)
    project.config["model"]["path"] = models
    project.write_config()
    return project


@pytest.mark.usefixtures("warm_python")
def test_each_model_gets_a_run_that_begins_when_those_before_have_ended(project):
    project.config["trainer"]["num_epochs"] = 60
    project.write_config()
    first = api.start_training(project.workspace, api.StartTraining())
    second, third = first.then

    def waits() -> bool:
        progress = report(project, second).progress
        return progress is not None and progress.phase == f"wait for {first.run_id}"

    wait_until(waits)
    api.cancel_run(project.workspace, api.CancelRun(run_id=second))
    assert ended(project, second).status == "cancelled"
    # The third goes on waiting, for the first: one run at a time.
    wait_until(lambda: report(project, first.run_id).progress is not None)
    api.cancel_run(project.workspace, api.CancelRun(run_id=first.run_id))
    last = ended(project, third)

    assert last.status == "succeeded"
    begun = next(find_run(project.workspace, third).read_events()).time
    assert begun >= (ended(project, first.run_id).ended_at or "?")
    requested = json.loads((project.root / "runs" / third / "config.json").read_text("utf-8"))
    assert requested["model"]["path"] == project.config["model"]["path"][2]


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("edited", ["config.yml", "train.jsonl"])
def test_a_run_that_waits_trains_the_config_it_was_started_with_and_no_other_rows(project, edited):
    before = create_run(project.workspace, RunKind.SFT, {})
    lock = before.owner_lock()
    assert lock.try_acquire()
    before.write(msgspec.structs.replace(before.read(), status=RunStatus.RUNNING))
    requested = api.StartTraining(overrides=(f"model.path={project.config['model']['path'][0]}",))
    config = project.root / "config.yml"
    state = start_run(
        project.workspace,
        RunKind.SFT,
        requested.model_dump(mode="json"),
        environment=run_environment(),
        new=NewRun(
            start_after=StartAfter(after=[before.run_id]),
            inputs=[project.root / "train.jsonl"],
            run_files={given_config(config): config.read_bytes()},
        ),
    )
    wait_until(lambda: report(project, state.run_id).progress is not None)

    requested_rate = project.config["trainer"]["learning_rate"]
    if edited == "config.yml":
        project.config["trainer"]["learning_rate"] = 1.0
        project.write_config()
    else:
        project.write(ROWS[::-1])
    before.write(msgspec.structs.replace(before.read(), status=RunStatus.SUCCEEDED))
    lock.release()

    last = ended(project, state.run_id)
    if edited == "config.yml":
        assert last.status == "succeeded"
        trained = json.loads((project.root / "runs" / state.run_id / "config.json").read_text())
        assert trained["trainer"]["learning_rate"] == requested_rate
    else:
        assert last.error is not None
        problem = f"{project.root / edited} has changed since this run was started"
        assert last.error.problem == problem
        assert "start it again" in last.error.fix


def test_nothing_is_started_if_one_of_the_models_is_not_there(project):
    project.config["model"]["path"][1] = "/nowhere/at-all"
    project.write_config()

    with pytest.raises(EngineError, match="/nowhere/at-all"):
        api.start_training(project.workspace, api.StartTraining())

    assert not (project.root / "runs").exists()


@pytest.mark.parametrize(
    ("paths", "reported"),
    [
        ([], "not a list of model names"),
        ([3], "not a list of model names"),
        (["a", "a"], "a model twice"),
    ],
)
def test_a_list_without_models_is_refused(project, paths, reported):
    project.config["model"]["path"] = paths
    project.write_config()

    with pytest.raises(ConfigError, match=reported):
        api.start_training(project.workspace, api.StartTraining())


def forecast(memory_gb: float, seconds: float | None, *, fits: bool = True) -> TrainingForecast:
    return TrainingForecast(
        method="sft",
        device="cpu",
        rows=8,
        skipped={},
        longest_tokens=9,
        epoch_tokens=72,
        steps=2,
        parameters=1000,
        trained_parameters=1000,
        memory_gb=memory_gb,
        memory_parts_gb={},
        memory_free_gb=10,
        measured_memory_gb=None,
        seconds=seconds,
        tokens_per_s=None,
        checkpoint_gb=1,
        disk_gb=2,
        disk_free_gb=10,
        fits=fits,
        changes=[] if fits else ["model.qlora_rank=32"],
        notes=["its own"],
    )


def test_a_plan_of_several_models_is_that_of_the_largest_and_tells_of_each(project):
    requests = requests_per_model(project.workspace, api.PlanTraining(overrides=("a.b=1",)))
    models = [request.overrides[-1] for request in requests]

    reported = combined_forecast(requests, [forecast(1, 5), forecast(3, 6), forecast(2, 7)])

    assert [request.overrides[0] for request in requests] == ["a.b=1"] * 3
    assert (reported.memory_gb, reported.seconds, reported.disk_gb, reported.fits) == (
        3,
        18,
        6,
        True,
    )
    assert reported.notes[1:] == [
        f"{models[0]}: 2 steps, 1.00 GB, 5 s",
        f"{models[1]}: 2 steps, 3.00 GB, 6 s",
        f"{models[2]}: 2 steps, 2.00 GB, 7 s",
        "its own",
    ]


def test_a_plan_of_several_models_says_what_does_not_fit(project):
    requests = requests_per_model(project.workspace, api.PlanTraining())

    reported = combined_forecast(
        requests, [forecast(9, 5), forecast(3, None, fits=False), forecast(2, 7)]
    )

    assert (reported.fits, reported.seconds, reported.changes) == (
        False,
        None,
        ["model.qlora_rank=32"],
    )
    assert reported.notes[2].endswith("3.00 GB, does not fit")


def test_one_model_is_planned_as_ever(project):
    project.config["model"]["path"] = "m"
    project.write_config()
    request = api.PlanTraining()

    assert requests_per_model(project.workspace, request) == [request]
    assert combined_forecast([request], [forecast(1, 2)]) == forecast(1, 2)
