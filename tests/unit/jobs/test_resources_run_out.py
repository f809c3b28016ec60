"""Training whose disk or memory runs out for real, and that goes on from its last checkpoint."""

import resource
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fakes.conversations import answer, user
from fakes.folders import MAY_MOUNT, mount, small_disk
from fakes.started_runs import ended, run_here, start
from fakes.training import Project, make_project
from fakes.waiting import wait_until
from stillroom.errors import ModelError
from stillroom.run_folder import find_run
from stillroom.train.loop.rows import epoch_order

ROWS = [{"messages": [user(f"Item {i}?"), answer(f"It costs {i}.")]} for i in range(12)]


def make(folder: Path, start: Path, **trainer) -> Project:
    project = make_project(
        folder, "sft", start, data={"batch_size": 1}, trainer={"save_step": 1, **trainer}
    )
    project.write(ROWS)
    project.write_config()
    return project


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@MAY_MOUNT
def test_a_full_disk_ends_the_run_and_with_room_again_it_goes_on_to_its_end(tmp_path, tiny_models):
    project = make(tmp_path, tiny_models.folder("llama", "chatml"))
    with small_disk(tmp_path / "runs", 2):
        report = run_here(project)
        run_id = report.run_id

        assert report.status == "failed"
        assert report.error is not None
        assert "could not be written" in report.error.problem
        assert "No space left" in report.error.problem
        assert "free disk space" in report.error.fix
        checkpoints = sorted((tmp_path / "runs" / run_id / "checkpoints").iterdir())
        # What was half written is gone again, and what is named is whole.
        assert 1 < len(checkpoints) < 12
        assert f"resumes at {checkpoints[-1].name}" in report.error.fix
        assert weights(checkpoints[-1])

        mount("-o", "remount,size=64m", str(tmp_path / "runs"))
        assert project.train("again", resume=run_id).steps == 12
        assert weights(project.checkpoint(run="again"))


@pytest.mark.usefixtures("warm_python")
@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process are Linux's")
def test_memory_that_runs_out_ends_the_run_and_with_more_of_it_it_goes_on(tmp_path, tiny_models):
    start_folder = tiny_models.folder(
        "llama", "chatml", max_position_embeddings=8192, hidden_size=256, intermediate_size=768
    )
    project = make(tmp_path, start_folder, keep_checkpoints=2)
    # The last row of the epoch is the one that needs much.
    rows = list(ROWS)
    rows[epoch_order(len(rows), 0, 0)[-1]] = {"messages": [user("Long?"), answer("12 " * 1800)]}
    project.write(rows)
    run_id = start(project)
    folder = tmp_path / "runs" / run_id

    wait_until(lambda: any(folder.glob("checkpoints/step_*")))
    pid = find_run(project.workspace, run_id).read().pid or 0
    held = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (held + (32 << 20), resource.RLIM_INFINITY))
    report = ended(project, run_id)

    assert report.status == "failed"
    assert report.error is not None
    assert report.error.problem.startswith("out of memory: ")
    assert f"start_training(resume={run_id}" in report.error.fix
    last = max(folder.glob("checkpoints/step_*"))
    assert last.name in report.error.fix
    assert weights(last)
    resumed = project.train("again", "model.microbatch_tokens=512", resume=run_id)
    assert resumed.steps == 12


def test_broken_weights_are_named_before_a_step_is_taken(tmp_path, tiny_models):
    broken = tmp_path / "broken"
    shutil.copytree(tiny_models.folder("llama", "chatml"), broken)
    file = broken / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})

    project = make(tmp_path, broken)
    with pytest.raises(ModelError, match=r"model\.norm\.weight has values that are not finite"):
        project.train()

    assert project.reporter.measured == []
