"""A Ray cluster is named by the same word as any machine, and its run's process stays here."""

from pathlib import Path

import pytest

from stillroom.api.placement import placed
from stillroom.errors import InputError
from stillroom.evaluate.request import EvaluateModel
from stillroom.rollout.request import GenerateRollouts
from stillroom.settings import Workspace
from stillroom.train.config.request import StartTraining


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    text = "cluster: {ray: {address: 'ray://head:10001', workers: 4}}\nplain: {ray: head:6379}\n"
    (tmp_path / "machines.yml").write_text(text, encoding="utf-8")
    return Workspace(tmp_path)


def test_rollouts_go_over_the_cluster(workspace):
    request = GenerateRollouts(model="m", input="prompts.txt", where="cluster", temperature=0.2)
    given, machine = placed(workspace, request)
    assert machine is None
    assert (given.where, given.ray_address, given.ray_workers) == (None, "ray://head:10001", 4)
    assert given.temperature == 0.2
    assert given.model_fields_set >= {"input", "temperature", "ray_address"}


def test_what_the_request_says_of_workers_counts(workspace):
    request = GenerateRollouts(model="m", input="prompts.txt", where="cluster", ray_workers=9)
    assert placed(workspace, request)[0].ray_workers == 9
    plain = GenerateRollouts(model="m", input="prompts.txt", where="plain")
    assert (
        placed(workspace, plain)[0].ray_workers
        == GenerateRollouts(model="m", input="p").ray_workers
    )


def test_training_is_launched_by_the_cluster(workspace):
    request = StartTraining(where="cluster", overrides=("trainer.num_epochs=2",))
    given, machine = placed(workspace, request)
    assert machine is None
    assert given.overrides == (
        "trainer.num_epochs=2",
        "launcher.kind=ray",
        "launcher.address=ray://head:10001",
        "launcher.num_processes=4",
    )


def test_a_number_of_processes_that_the_request_names_stays(workspace):
    request = StartTraining(where="cluster", overrides=("launcher.num_processes=2",))
    assert "launcher.num_processes=4" not in placed(workspace, request)[0].overrides
    plain = placed(workspace, StartTraining(where="plain"))[0]
    assert plain.overrides == ("launcher.kind=ray", "launcher.address=head:6379")


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (
            GenerateRollouts(model="m", input="p", where="cluster", ray_address="auto"),
            "both name a Ray",
        ),
        (StartTraining(where="cluster", budget_usd=5), "not ours to stop"),
        (EvaluateModel(where="cluster", model="m", data="p"), "only generate_rollouts"),
    ],
)
def test_what_a_cluster_cannot_do_is_refused(workspace, request_, text):
    with pytest.raises(InputError, match=text):
        placed(workspace, request_)
