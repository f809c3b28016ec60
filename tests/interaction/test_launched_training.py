"""Runs that accelerate starts in two processes: killed, told of, gone on with."""

import os
import signal

import psutil
import pytest
import torch
from safetensors.torch import load_file

from fakes.conversations import answer, user
from fakes.started_runs import ended, losses, start
from fakes.training import make_project
from fakes.waiting import wait_until
from stillroom.run_folder import find_run
from stillroom.train.distributed.rank_folder import RankFiles

ROWS = [{"messages": [user(f"Item {i}?"), answer(f"It costs {i}.")]} for i in range(24)]
STEPS = 18


def project_of(root, tiny_models):
    project = make_project(
        root,
        "sft",
        tiny_models.folder("qwen3", "chatml"),
        data={"batch_size": 4},
        trainer={"num_epochs": 3, "save_step": 3, "keep_checkpoints": 3},
        launcher={"kind": "accelerate", "num_processes": 2},
    )
    project.write(ROWS)
    project.write_config()
    return project


@pytest.mark.usefixtures("warm_python")
def test_a_process_that_is_killed_is_named_and_the_run_goes_on_with_shared_weights(
    tmp_path, tiny_models
):
    project = project_of(tmp_path, tiny_models)
    run_id = start(project)
    folder = find_run(project.workspace, run_id).path
    wait_until(lambda: len(list(folder.glob("checkpoints/step_*"))) >= 2)
    ranks = {n: psutil.Process(s.pid) for n, s in RankFiles(folder / "ranks").starts().items()}
    os.kill(ranks[1].pid, signal.SIGKILL)

    report = ended(project, run_id)

    assert report.status == "failed"
    assert report.error is not None
    whom = f"rank 1 of 2 processes (pid {ranks[1].pid} on "
    assert report.error.problem.startswith(whom)
    assert "was killed by SIGKILL" in report.error.problem
    assert f"start_training(resume={run_id}) resumes at step_0" in report.error.fix
    gone, alive = psutil.wait_procs(ranks.values(), timeout=60)
    assert not alive, f"left behind: {alive}"
    assert len(gone) == 2

    resumed = ended(project, start(project, resume=run_id, overrides=["launcher.strategy=fsdp2"]))

    assert resumed.status == "succeeded", resumed.error
    config = project.root / "runs" / resumed.run_id / "ranks" / "accelerate.yaml"
    assert "distributed_type: FSDP" in config.read_text("utf-8")
    whole = project.train("whole", "launcher.kind=local", "launcher.num_processes=null")
    alone = [metrics["loss"] for metrics in project.reporter.measured]
    reported = losses(project, resumed.run_id)
    assert list(reported) == list(range(1, STEPS + 1))
    torch.testing.assert_close(list(reported.values()), alone, atol=1e-4, rtol=1e-4)
    ours, reference = (
        load_file(project.root / checkpoint / "model.safetensors")
        for checkpoint in (resumed.result["checkpoint"], whole.checkpoint)
    )
    assert ours.keys() == reference.keys()
    for name, tensor in reference.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-3, rtol=0)
