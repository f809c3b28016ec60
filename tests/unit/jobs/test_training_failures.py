"""Training that ends badly: the state is clear, the reason is told, the last checkpoint is good."""

import json
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fakes.conversations import answer, user
from fakes.started_runs import ended, losses, run_here, start
from fakes.training import Project, make_project
from fakes.waiting import wait_until
from stillroom.errors import DataError, DivergedError
from stillroom.jobs.failures import failure_of
from stillroom.run_folder import LIMITS_FILE, RunFolder, create_run, find_run
from stillroom.types import RunKind

ROWS = [{"messages": [user(f"Item {i}?"), answer(f"It costs {i}.")]} for i in range(40)]


@pytest.fixture
def project(tmp_path, tiny_models) -> Project:
    project = make_project(
        tmp_path,
        "sft",
        tiny_models.folder("llama", "chatml"),
        data={"batch_size": 1},
        trainer={"num_epochs": 3, "save_step": 1, "keep_checkpoints": 2},
    )
    project.write(ROWS)
    project.write_config()
    return project


@contextmanager
def no_file_larger_than(num_bytes: int) -> Iterator[None]:
    """Limits the files that this process writes, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("warm_python")
def test_a_killed_run_says_how_it_goes_on_and_ends_as_the_unbroken_one(project) -> None:
    run_id = start(project)
    folder = find_run(project.workspace, run_id)
    wait_until(lambda: len(list(folder.path.glob("checkpoints/step_*"))) == 2)
    os.kill(folder.read().pid or 0, signal.SIGKILL)

    report = ended(project, run_id)

    assert report.status == "interrupted"
    assert report.error is not None
    assert "exited before finishing" in report.error.problem
    assert f"start_training(resume={run_id}) resumes at step_0" in report.error.fix
    resumed = run_here(project, resume=run_id, overrides=["trainer.save_step=-1"])
    assert resumed.status == "succeeded", resumed.error
    whole = run_here(project, overrides=["trainer.save_step=-1"])
    assert losses(project, resumed.run_id) == losses(project, whole.run_id)
    ours, reference = (
        load_file(project.root / r.result["checkpoint"] / "model.safetensors")
        for r in (resumed, whole)
    )
    assert all(torch.equal(ours[name], reference[name]) for name in ours)


def test_a_checkpoint_that_does_not_fit_on_the_disk_ends_the_run_with_what_to_do(project) -> None:
    with no_file_larger_than(100_000):
        report = run_here(project)

    assert report.status == "failed"
    assert report.error is not None
    assert "the checkpoint of step 1 could not be written" in report.error.problem
    assert "free disk space" in report.error.fix
    assert list((project.root / report.folder / "checkpoints").iterdir()) == []


def test_an_unreadable_row_far_down_is_named_before_a_model_is_loaded(project) -> None:
    lines = [json.dumps(row) for row in ROWS * 30]
    lines[1100] = lines[1100][:-9]
    (project.root / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")

    report = run_here(project)

    assert report.status == "failed"
    assert report.error is not None
    assert "train.jsonl:1101: the line is not valid JSON" in report.error.problem
    assert "validate" in report.error.fix
    assert report.progress is None


def test_a_loss_that_is_no_number_leaves_the_checkpoint_before_it(project) -> None:
    project.config["trainer"] |= {"learning_rate": 1e4, "max_grad_norm": 1e9, "num_epochs": 20}
    project.write_config()

    report = run_here(project)

    assert report.status == "failed"
    assert report.error is not None
    assert "diverged" in report.error.problem
    assert "lower trainer.learning_rate" in report.error.fix
    checkpoints = sorted((project.root / "runs" / report.run_id / "checkpoints").iterdir())
    assert f"model.path={checkpoints[-1]}" in report.error.fix
    weights = load_file(checkpoints[-1] / "model.safetensors")
    assert all(bool(tensor.isfinite().all()) for tensor in weights.values())


def memory_errors() -> Iterator[BaseException]:
    yield MemoryError()
    yield torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    try:
        torch.empty(1 << 60)
    except RuntimeError as error:
        yield error


@pytest.fixture
def run_with_checkpoint(project):
    folder = create_run(project.workspace, RunKind.SFT, {})
    for step in (2, 4):
        checkpoint = folder.path / "checkpoints" / f"step_{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "training_state.json").write_text("{}", encoding="utf-8")
    # A checkpoint that is still being written is none.
    (folder.path / "checkpoints" / ".step_000006.partial").mkdir()
    return folder


def test_every_way_to_run_out_of_memory_is_told_as_such(run_with_checkpoint) -> None:
    reported = [failure_of(error, run_with_checkpoint, RunKind.SFT) for error in memory_errors()]

    assert len(reported) == 3
    for failure in reported:
        assert failure.problem.startswith("out of memory: ")
        assert failure.fix.startswith("lower model.microbatch_tokens")
        resumed = f"start_training(resume={run_with_checkpoint.run_id}, overrides="
        assert f'{resumed}["model.microbatch_tokens=512"]) resumes at step_000004' in failure.fix
        assert failure.fix.endswith("step_000004 starts from the last good checkpoint")


@pytest.mark.parametrize(
    ("error", "problem", "fix"),
    [
        (
            OSError(28, "No space left on device"),
            "no space left on the disk",
            "resume={id}) resumes at",
        ),
        (
            OSError(13, "Permission denied"),
            "the operating system reported",
            "resume={id}) resumes at",
        ),
        (KeyError("x"), "unexpected KeyError", "resume={id}) resumes at step_000004"),
        (
            DivergedError("the gradient is nan", "lower it"),
            "nan",
            "lower it; a new run with model.path=",
        ),
        (DataError("row 3 is bad", "mend it"), "row 3", "mend it; then start_training(resume={id}"),
    ],
)
def test_what_is_left_to_go_on_with_is_told(run_with_checkpoint, error, problem, fix) -> None:
    failure = failure_of(error, run_with_checkpoint, RunKind.SFT)

    assert problem in failure.problem
    assert fix.format(id=run_with_checkpoint.run_id) in failure.fix


def test_other_runs_have_no_checkpoints_to_speak_of(run_with_checkpoint: Path) -> None:
    failure = failure_of(OSError(28, "full"), run_with_checkpoint, RunKind.ROLLOUTS)

    assert "resume" not in failure.fix


@pytest.mark.parametrize("code", [28, 13])
def test_a_fault_of_a_machine_elsewhere_is_not_taken_for_one_of_this_machine(
    run_with_checkpoint: RunFolder, code: int
) -> None:
    (run_with_checkpoint.path / LIMITS_FILE).write_text("{}", encoding="utf-8")
    error = OSError(code, os.strerror(code), str(run_with_checkpoint.path / "events.jsonl"))
    failure = failure_of(error, run_with_checkpoint, RunKind.SFT)

    assert "the run's machine" in failure.problem
    # A path there is shown as the one here that it stands for.
    assert str(run_with_checkpoint.path) not in failure.problem
    assert "resumes at step_000004" in failure.fix
