"""What a run and its processes tell each other, and what config.yml's `launcher` may say."""

import socket
import subprocess
import sys

import pytest

import stillroom
from fakes.conversations import answer, user
from fakes.ranks import in_processes
from fakes.reporters import KeptReporter
from fakes.training import make_project
from stillroom.errors import ConfigError, DataError, DivergedError
from stillroom.files import write_json
from stillroom.processes import end_process
from stillroom.train.config.request import PlanTraining, check_launcher
from stillroom.train.config.sections import LauncherSection
from stillroom.train.distributed.accelerate import accelerate_config
from stillroom.train.distributed.rank_folder import (
    RankEnd,
    RankFailure,
    RankFiles,
    RankJob,
    RankReporter,
    RankStart,
    failure_of_ranks,
    relay_rank_reports,
    this_process,
)
from stillroom.train.planning.plan import plan_training
from stillroom.train.planning.weightless_models import process_count
from stillroom.train.rank_main import train_as_rank

ROWS = [{"messages": [user(f"Item {i}?"), answer(f"It costs {i}.")]} for i in range(12)]
WATCH = """
import sys, time, pathlib, msgspec
from stillroom.train.distributed.rank_folder import Owner, RankFiles, watch_owner
watch_owner(RankFiles(pathlib.Path(sys.argv[1])), msgspec.json.decode(sys.argv[2], type=Owner))
print("watches", flush=True)
time.sleep(60)
"""


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "ranks"
    folder.mkdir()
    return RankFiles(folder)


@pytest.fixture
def project(tmp_path, tiny_models):
    project = make_project(tmp_path, "sft", tiny_models.folder("llama", "chatml"))
    project.write(ROWS)
    project.write_config()
    return project


def job_of(project, run, *, version=stillroom.__version__):
    """Returns the files of a run whose processes are to train the project."""
    folder = project.root / "runs" / run
    files = RankFiles(folder / "ranks")
    files.folder.mkdir(parents=True)
    job = RankJob(
        workspace=str(project.root),
        request={"config": "config.yml"},
        run=str(folder),
        is_sharded=False,
        owner=this_process(),
        version=version,
    )
    write_json(files.job, job)
    return files


def test_what_the_first_process_tells_reaches_the_run_and_its_stop_the_others(project):
    files = job_of(project, "run")
    # Asked to stop once the second step is known.
    kept = KeptReporter(lambda: len(kept.measured) >= 2)
    project.config["trainer"]["num_epochs"] = 400
    project.write_config()

    with relay_rank_reports(files, kept):
        ends = in_processes(lambda peers: train_as_rank(files, peers), project.root / "forked")

    assert [end.is_cancelled for end in ends] == [True, True]
    steps = len(kept.measured)
    assert 2 <= steps < 1200
    assert kept.progressed[-1] == (steps, 1200)
    assert all(metrics["loss"] > 0 for metrics in kept.measured)
    assert kept.notes == [f"checkpoint written: {project.checkpoint(f'step_{steps:06d}', 'run')}"]
    assert project.checkpoints("run") == [f"step_{steps:06d}"]


def test_an_error_of_the_rows_is_told_as_it_is_in_one_process(project):
    files = job_of(project, "run")
    project.write([*ROWS, {"messages": [user("no answer")]}])

    ends = in_processes(lambda peers: train_as_rank(files, peers), project.root / "forked")

    with pytest.raises(DataError) as caught:
        project.train("alone")
    error = failure_of_ranks(files, {0: "ended with exit code 1", 1: "ended with exit code 1"})
    assert [end.failure.kind for end in ends] == ["DataError", "DataError"]
    assert str(error) == str(caught.value)


def test_machines_with_another_version_are_refused(project):
    files = job_of(project, "run", version="0.0.1")

    ends = in_processes(lambda peers: train_as_rank(files, peers), project.root / "forked")

    assert "the run was started with 0.0.1" in ends[1].failure.problem


def failed(at, **fields):
    return RankEnd(time=at, failure=RankFailure(**fields))


def test_a_process_that_was_killed_is_the_reason_and_not_those_that_missed_it(files):
    files.record_start(0, 2)
    write_json(files.folder / "rank_1.json", RankStart(host="far", pid=7, size=2))
    files.log_file(1).write_text("loading\nhalf way through\n", encoding="utf-8")
    files.record_end(0, failed(1.0, kind="RuntimeError", problem="Connection closed by peer"))

    error = failure_of_ranks(files, {0: "ended with exit code 1", 1: "was killed by SIGKILL"})

    assert error.problem == (
        "rank 1 of 2 processes (pid 7 on far) was killed by SIGKILL; its log ends with: "
        "half way through"
    )
    assert str(files.log_file(1)) in error.fix
    assert "launcher.strategy: fsdp2" in error.fix


def test_of_several_errors_the_first_one_counts(files):
    files.record_start(0, 2)
    files.record_start(1, 2)
    files.record_end(0, failed(5.0, kind="RuntimeError", problem="Connection closed by peer"))
    files.record_end(1, failed(4.0, kind="OutOfMemoryError", problem="CUDA out of memory"))

    error = failure_of_ranks(files, {})

    assert str(error) == "OutOfMemoryError: CUDA out of memory (rank 1 of 2 processes)"
    files.record_end(1, failed(4.0, kind="OSError", problem="No space left", errno=28))
    assert failure_of_ranks(files, {}).errno == 28
    files.record_end(1, failed(4.0, kind="DivergedError", problem="nan", fix="lower it"))
    assert isinstance(failure_of_ranks(files, {}), DivergedError)


def test_what_is_not_finite_arrives(files):
    kept = KeptReporter()
    with relay_rank_reports(files, kept):
        RankReporter(files, is_first=True).metrics(3, {"loss": float("nan"), "grad_norm": 2.0})
        RankReporter(files, is_first=False).note("of another process")

    assert kept.measured[0]["grad_norm"] == 2.0
    assert kept.measured[0]["loss"] != kept.measured[0]["loss"]
    assert kept.notes == []


def test_the_time_that_is_left_arrives(files):
    kept = KeptReporter()
    with relay_rank_reports(files, kept):
        first = RankReporter(files, is_first=True)
        first.progress(1, 4, unit="steps", phase="sft", eta_s=90.5)
        first.progress(2, 4, unit="steps", phase="sft")

    assert kept.progressed == [(1, 4), (2, 4)]
    assert kept.etas == [90.5, None]


@pytest.mark.parametrize("is_told", [True, False])
def test_a_process_ends_when_its_run_is_gone(files, is_told):
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    import msgspec

    from stillroom.processes import process_start

    start = process_start(owner.pid)
    place = msgspec.structs.replace(this_process(), pid=owner.pid, start=start)
    rank = subprocess.Popen(
        [sys.executable, "-c", WATCH, str(files.folder), msgspec.json.encode(place)],
        stdout=subprocess.PIPE,
    )
    try:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"watches\n"
        assert rank.poll() is None
        if is_told:
            files.abandoned.touch()
        else:
            owner.kill()
        assert rank.wait(10) == 70
    finally:
        for process in (owner, rank):
            end_process(process)
        if rank.stdout:
            rank.stdout.close()


def test_accelerate_is_told_what_was_asked():
    section = LauncherSection(
        kind="accelerate",
        num_processes=8,
        strategy="fsdp2",
        num_machines=2,
        main_address="10.0.0.1:29500",
    )

    config = accelerate_config(section, size=8)

    assert config["distributed_type"] == "FSDP"
    assert config["fsdp_config"]["fsdp_version"] == 2
    assert (config["num_processes"], config["num_machines"]) == (8, 2)
    assert (config["main_process_ip"], config["main_process_port"]) == ("10.0.0.1", 29500)
    plain = accelerate_config(LauncherSection(kind="accelerate", num_processes=2), size=2)
    assert plain["distributed_type"] == "MULTI_GPU"
    assert "fsdp_config" not in plain


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        ({"kind": "ray", "num_processes": 2}, "needs address"),
        ({"kind": "ray", "address": "auto"}, "num_processes"),
        ({"kind": "accelerate", "address": "auto"}, "launcher.address has no effect"),
        ({"num_processes": 2}, "launcher.num_processes has no effect with kind: local"),
        ({"kind": "accelerate", "num_machines": 2, "num_processes": 2}, "needs main_address"),
        (
            {"kind": "accelerate", "num_machines": 2, "num_processes": 3, "main_address": "a:1"},
            "a multiple of num_machines",
        ),
        ("slurm", "'local', 'accelerate' or 'ray'"),
    ],
)
def test_what_a_launcher_cannot_use_is_refused_by_name(project, given, reported):
    project.config["launcher"] = given

    with pytest.raises(ConfigError, match=reported):
        project.train()


def test_the_name_of_a_launcher_is_enough():
    assert LauncherSection.model_validate("accelerate").kind == "accelerate"
    with pytest.raises(ConfigError, match=r"launcher.num_processes"):
        process_count(LauncherSection(kind="accelerate"))
    assert process_count(LauncherSection(kind="accelerate", num_processes=3)) == 3


DISTILL = {"dataset_type": "distill", "teacher": {"path": "demo/teacher"}}


@pytest.mark.parametrize(
    ("strategy", "sections", "reported"),
    [
        (
            "fsdp2",
            {"model": {"path": "demo/student", "quantization": "nf4", "qlora_rank": 4}},
            "fsdp2 cannot shard 4-bit weights",
        ),
        ("fsdp2", DISTILL, "fsdp2 shards the weights that distill samples from"),
        (
            "ddp",
            {**DISTILL, "rollout": {"max_staleness": 1}},
            "rollout.max_staleness needs a single process",
        ),
    ],
)
def test_what_one_process_alone_can_do_is_refused(project, strategy, sections, reported):
    launcher = {"kind": "accelerate", "num_processes": 2, "strategy": strategy}
    project.config |= {"launcher": launcher, **sections}

    with pytest.raises(ConfigError, match=reported):
        project.train()


def test_a_cluster_that_does_not_answer_is_told_before_anything_starts(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        section = LauncherSection(kind="ray", num_processes=2, address=f"ray://{address}")
        with pytest.raises(ConfigError, match=f"no Ray cluster responds at .*{address}"):
            check_launcher(section)
        free.listen()
        check_launcher(section)


def test_the_plan_is_that_of_all_processes(project):
    alone = plan_training(project.workspace, PlanTraining())
    launcher = ("launcher.kind=accelerate", "launcher.num_processes=2")
    both = plan_training(project.workspace, PlanTraining(overrides=launcher))
    sharded = plan_training(
        project.workspace, PlanTraining(overrides=(*launcher, "launcher.strategy=fsdp2"))
    )

    assert both.steps == alone.steps
    ours, reference = both.memory_parts_gb, alone.memory_parts_gb
    assert ours["weights"] == pytest.approx(2 * reference["weights"])
    assert ours["optimizer"] == pytest.approx(2 * reference["optimizer"])
    assert sharded.memory_parts_gb["optimizer"] == pytest.approx(reference["optimizer"])
    assert sharded.memory_parts_gb["gathered"] > 0
    [note] = [note for note in both.notes if note.startswith("the run has 2 processes")]
    assert note.endswith("; the time excludes communication between them")
