"""plan_training(where=): the machine that is named, then the others of machines.yml."""

import pytest

from fakes.conversations import answer, user
from fakes.machines import GPU_BOX, ScriptedMachines, name_machines
from fakes.training import make_project
from stillroom.errors import InputError
from stillroom.remote.host import UnreachableError
from stillroom.remote.planning import plan_training
from stillroom.train.config.request import PlanTraining
from stillroom.train.planning.forecast import combined_forecast, requests_per_model

MACHINES = """
gpu-box: {ssh: me@host, price_per_hour: 2.40}
far: {ssh: me@far}
sky: {skypilot: {accelerators: "L4:1"}, price_per_hour: 0.8}
cluster: {ray: "ray://head:10001"}
"""
ROWS = [{"messages": [user(f"Item {i}?"), answer(f"It costs {i}.")]} for i in range(6)]


@pytest.fixture
def project(tmp_path, tiny_models):
    project = make_project(tmp_path, "sft", tiny_models.folder("llama", "chatml"))
    project.write(ROWS)
    project.write_config()
    name_machines(tmp_path, MACHINES)
    return project


def test_a_machine_is_asked_once_and_the_known_ones_are_weighed_beside_it(project):
    opened = ScriptedMachines({"gpu-box": GPU_BOX})
    request = PlanTraining(where="gpu-box")

    plan_training(project.workspace, request, opened=opened)
    result = plan_training(project.workspace, request, opened=opened)

    assert opened.asked == ["gpu-box"]
    assert opened.num_open == 0
    assert [one.machine for one in result.machines] == ["gpu-box", "sky"]
    assert (result.device, result.memory_free_gb) == ("cuda", pytest.approx(78.9))
    assert result.disk_free_gb == 500.0


def test_a_machine_that_does_not_answer_is_an_error_and_no_guess(project):
    opened = ScriptedMachines({"far": UnreachableError("no route to far", "is it on?")})

    with pytest.raises(UnreachableError, match="no route"):
        plan_training(project.workspace, PlanTraining(where="far"), opened=opened)


@pytest.mark.parametrize(
    ("where", "overrides", "problem"),
    [
        ("cluster", (), "a Ray cluster, of whose GPUs nothing is known"),
        ("gpubox", (), "there is no machine"),
        ("gpu-box", ("trainer.trackio_project=p",), "trackio_project"),
    ],
)
def test_what_start_training_would_refuse_is_refused(project, where, overrides, problem):
    opened = ScriptedMachines({"gpu-box": GPU_BOX})

    with pytest.raises(InputError, match=problem):
        plan_training(
            project.workspace, PlanTraining(where=where, overrides=overrides), opened=opened
        )


def test_several_models_are_planned_one_after_another_on_each_machine(project, tiny_models):
    opened = ScriptedMachines({"gpu-box": GPU_BOX})
    path = str(tiny_models.folder("llama", "chatml"))
    other = str(tiny_models.folder("qwen3", "chatml"))
    request = PlanTraining(where="gpu-box", overrides=(f"model.path=[{path}, {other}]",))
    requests = requests_per_model(project.workspace, request)

    forecasts = [plan_training(project.workspace, one, opened=opened) for one in requests]
    both = combined_forecast(requests, forecasts)

    assert [one.machine for one in both.machines] == ["gpu-box", "sky"]
    alone = forecasts[0].machines[0].usd_most
    assert alone is not None
    assert both.machines[0].usd_most == pytest.approx(2 * alone, rel=0.2)
