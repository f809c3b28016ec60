"""Training by two workers of a real local Ray cluster: one process's losses, stopped together."""

import pytest
import torch
from safetensors.torch import load_file

from fakes.conversations import answer, user
from fakes.ray_marks import RAY_MARKS
from fakes.reporters import KeptReporter
from fakes.training import make_project
from stillroom.errors import DataError, RunCancelledError

pytestmark = RAY_MARKS
ROWS = [{"messages": [user(f"Item {i}?"), answer(f"It costs {i}.")]} for i in range(11)]
RAY = ("launcher.kind=ray", "launcher.num_processes=2", "launcher.address=local")


@pytest.fixture
def project(tmp_path, tiny_models):
    project = make_project(tmp_path, "sft", tiny_models.folder("qwen3", "chatml"))
    project.write(ROWS)
    return project


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_workers_train_as_one_process_does(project, strategy):
    alone = project.train("alone")
    losses = [metrics["loss"] for metrics in project.reporter.measured]
    project.reporter.measured.clear()

    both = project.train("both", *RAY, f"launcher.strategy={strategy}")

    assert both.trained_tokens == alone.trained_tokens
    reported = [metrics["loss"] for metrics in project.reporter.measured]
    assert reported == pytest.approx(losses, abs=2e-6)
    ours, reference = (
        load_file(project.root / result.checkpoint / "model.safetensors")
        for result in (both, alone)
    )
    for name, tensor in reference.items():
        torch.testing.assert_close(ours[name], tensor, atol=5e-5, rtol=0)


def test_workers_stop_together_and_tell_an_error_as_it_is(project):
    project.config["trainer"]["num_epochs"] = 500
    kept = project.reporter = KeptReporter(lambda: len(kept.measured) >= 2)
    with pytest.raises(RunCancelledError):
        project.train("stopped", *RAY)
    [name] = project.checkpoints("stopped")
    assert name == f"step_{len(kept.measured):06d}"

    project.write([*ROWS, {"messages": [user("no answer")]}])
    with pytest.raises(DataError, match=r"train.jsonl:12"):
        project.train("wrong", *RAY)
