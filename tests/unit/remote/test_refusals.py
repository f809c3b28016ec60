"""What only this machine has is refused by name, before anything is sent."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fakes.conversations import answer, user
from fakes.elsewhere import box, own_machine
from fakes.machines import add_remote_run
from fakes.tiny_models import TinyModels
from fakes.training import Project, make_project
from stillroom.api.placement import (
    check_not_running_elsewhere,
    check_not_written_elsewhere,
    pack_job,
    resolve_machine,
    with_budget_left,
    with_job,
)
from stillroom.errors import EngineError, InputError, RunError
from stillroom.evaluate.request import EvaluateModel
from stillroom.export.request import ExportModel, plan_export
from stillroom.files import write_json
from stillroom.outputs import OutputHeldError
from stillroom.remote.bundle.checks import check_remote_config, check_remote_needs
from stillroom.remote.bundle.needs import (
    Needs,
    needs_of_export,
    needs_of_generation,
    needs_of_training,
)
from stillroom.rollout.plan import plan_generation
from stillroom.rollout.request import GenerateRollouts
from stillroom.run_folder import NewRun, RemoteView, create_run
from stillroom.settings import Workspace
from stillroom.train.config.request import StartTraining, plan_request
from stillroom.types import RunKind, RunStatus

ROWS = [{"messages": [user("Hello?"), answer("Yes.")]}]
PROMPTS = [{"prompt": "Hello?", "expected_answer": "Yes."}]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.setenv("STILLROOM_CONFIG", str(tmp_path / "own"))
    own_machine(
        "box: {ssh: me@gpu.test, price_per_hour: 2}\n"
        "free: {ssh: me@gpu.test}\n"
        "cluster: {ray: 'ray://head:10001'}\n"
    )
    (tmp_path / "work").mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in PROMPTS)
    (tmp_path / "work" / "prompts.jsonl").write_text(lines, encoding="utf-8")
    return Workspace(tmp_path / "work")


def project(workspace: Workspace, models: TinyModels, **config: Any) -> Project:
    made = make_project(workspace.root, "sft", models.folder("llama", "chatml"))
    made.config |= config
    made.write(ROWS)
    made.write_config()
    return made


def generate(**options: Any) -> GenerateRollouts:
    asked = {"input": "prompts.jsonl", "output": "out.jsonl", "model": "m", "where": "box"}
    return GenerateRollouts.model_validate(asked | options)


@pytest.mark.parametrize(
    ("request_of", "reported"),
    [
        (lambda: generate(dry_run=True), "not supported with dry_run"),
        (lambda: EvaluateModel(data="d", model="m", where="box", dry_run=True), "dry_run"),
        (lambda: generate(ray_address="auto"), "ray_address and where: box"),
        (lambda: ExportModel(model="m", output="o", format="gguf", where="box"), "format gguf"),
        (lambda: StartTraining(where="free", budget_usd=1), "whose price is unknown"),
        (lambda: StartTraining(budget_usd=1), "training on this machine is free"),
        (
            lambda: StartTraining(where="box", budget_usd=0.003),
            r"pays for 5 s of box \(\$2 an hour",
        ),
        (lambda: StartTraining(where="bix"), "did you mean 'box'"),
        (lambda: ExportModel(model="m", output="o", where="cluster"), "is a Ray cluster"),
    ],
)
def test_a_request_that_means_this_machine_is_refused(workspace, request_of, reported):
    with pytest.raises(InputError, match=reported) as caught:
        resolve_machine(workspace, request_of())
    assert len(caught.value.fix.split()) > 3


@pytest.mark.parametrize(
    ("overrides", "reported"),
    [
        (
            ["launcher={kind: ray, address: local, num_processes: 2}"],
            "launcher: ray and where: box both choose",
        ),
        (
            ["launcher={kind: accelerate, num_machines: 2, main_address: 'a:1', num_processes: 2}"],
            "launcher.num_machines 2",
        ),
        (["trainer.trackio_project=mine"], "trackio_project cannot be combined"),
    ],
)
def test_settings_that_mean_this_machine_are_refused(workspace, tiny_models, overrides, reported):
    project(workspace, tiny_models)
    plan = plan_request(workspace, StartTraining(where="box", overrides=tuple(overrides)))
    with pytest.raises(InputError, match=reported):
        check_remote_config(plan.config, box(workspace))


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ({"base_url": "http://localhost:8000/v1"}, "the model is at http://localhost:8000"),
        ({"base_url": "http://127.0.0.1:8000/v1"}, "the model is at"),
        ({"base_url": "http://[::1]:8000/v1"}, "the model is at"),
        ({"provider": "ollama"}, "the model is at"),
        ({"provider": "demo", "mcp_servers": ["http://localhost:8931/mcp"]}, "the MCP server is"),
        ({"provider": "demo", "mcp_servers": ["localhost:8931"]}, "the MCP server is at"),
        ({"provider": "demo", "mcp_servers": ["npx it --token abcdefgh1234"]}, "contains a secret"),
        ({"provider": "demo", "judge": "judge.yml"}, "the judge is at"),
    ],
)
def test_servers_of_this_machine_are_refused(workspace, options, reported):
    (workspace.root / "judge.yml").write_text(
        "{model: m, rubric: good, base_url: 'http://localhost:1/v1'}", encoding="utf-8"
    )
    request = generate(**({"model": "teacher"} | options))
    needs = needs_of_generation(plan_generation(workspace, request))
    with pytest.raises(InputError, match=reported.replace("[", r"\[")) as caught:
        check_remote_needs(needs, box(workspace))
    assert ("provider hf" in caught.value.fix) == reported.startswith("the model is at")


def test_a_teacher_served_on_this_machine_is_refused(workspace, tiny_models):
    made = project(workspace, tiny_models)
    made.config |= {
        "dataset_type": "distill",
        "data": {"train_file": "prompts.jsonl", "batch_size": 1},
        "teacher": {"path": "t", "provider": "vllm", "base_url": "http://localhost:8000/v1"},
    }
    made.write_config()
    request = StartTraining(where="box")
    with pytest.raises(InputError, match=r"teacher\.base_url is at http://localhost:8000/v1"):
        check_remote_needs(
            needs_of_training(request, plan_request(workspace, request)), box(workspace)
        )


def test_an_image_that_is_built_here_is_refused_and_one_with_a_name_is_not(workspace):
    rows = workspace.root / "docker.jsonl"
    rows.write_text('{"prompt": "a", "docker": "python:3.12"}\n', encoding="utf-8")
    check_remote_needs(Needs(prompts=[rows]), box(workspace))
    rows.write_text('{"prompt": "a", "docker": "local/web"}\n', encoding="utf-8")
    with pytest.raises(InputError, match=r"docker\.jsonl:1: docker 'local/web' is built from"):
        check_remote_needs(Needs(prompts=[rows]), box(workspace))


def test_what_a_run_lacks_here_is_no_reason_not_to_do_it_elsewhere(workspace, tiny_models):
    # An unknown host, and a cluster that does not answer, are looked for there.
    project(workspace, tiny_models)
    launcher = "launcher={kind: ray, address: '127.0.0.1:1', num_processes: 1}"
    with pytest.raises(EngineError):
        plan_request(workspace, StartTraining(overrides=(launcher,)))
    plan_request(workspace, StartTraining(overrides=(launcher,), where="box"))


def test_an_output_that_is_written_elsewhere_is_not_written_here_too(workspace):
    plan = plan_generation(workspace, generate(model="teacher", provider="demo"))
    spec = pack_job(workspace, box(workspace), lambda: needs_of_generation(plan))
    run = create_run(workspace, RunKind.ROLLOUTS, {}, with_job(NewRun(), spec))
    with pytest.raises(OutputHeldError, match=f"is being written by {run.run_id} on box"):
        check_not_written_elsewhere(workspace, plan.output)
    check_not_written_elsewhere(workspace, workspace.root / "other.jsonl")


def test_an_export_elsewhere_goes_to_a_new_folder(workspace, tiny_models):
    made = project(workspace, tiny_models)
    made.train("run-1")
    (workspace.root / "out").mkdir()
    request = ExportModel(model="run-1", output="out", where="box")
    plan = plan_export(workspace, request)
    spec = pack_job(workspace, box(workspace), lambda: needs_of_export(request, plan))
    assert spec is not None
    assert spec.spec.outputs == ["out"]
    (workspace.root / "out" / "config.json").touch()
    with pytest.raises(InputError, match="has an earlier export"):
        pack_job(workspace, box(workspace), lambda: needs_of_export(request, plan))


def test_a_run_that_may_go_on_elsewhere_is_resumed_only_once_it_was_asked_to_stop(workspace):
    spec = pack_job(workspace, box(workspace), Needs)
    run = create_run(workspace, RunKind.SFT, {}, with_job(NewRun(), spec))
    with pytest.raises(RunError, match=r"may still be running on box.*could run it twice"):
        check_not_running_elsewhere(workspace, run.run_id)
    run.ask_to_cancel()
    check_not_running_elsewhere(workspace, run.run_id)
    ended = create_run(workspace, RunKind.SFT, {}, with_job(NewRun(), spec))
    state = msgspec.structs.replace(ended.read(), status=RunStatus.INTERRUPTED)
    ended.write(state)
    check_not_running_elsewhere(workspace, ended.run_id)
    local = create_run(workspace, RunKind.SFT, {})
    check_not_running_elsewhere(workspace, local.run_id)


def test_a_training_that_goes_on_keeps_what_is_left_of_its_budget(workspace):
    over = RemoteView(where="box", phase="over", machine_usd=0.4)
    first = add_remote_run(workspace, over, status=RunStatus.CANCELLED, budget_usd=1.0)
    # A run here in between costs nothing and has no budget of its own.
    here = create_run(workspace, RunKind.SFT, {"resume": first.run_id}).run_id
    request, notes = with_budget_left(workspace, StartTraining(resume=here), box(workspace))
    assert request.budget_usd == pytest.approx(0.6)
    assert "up to $0.6000, what is left of " in notes[0]
    own = StartTraining(resume=here, budget_usd=3)
    assert with_budget_left(workspace, own, box(workspace)) == (own, [])
    free = create_run(workspace, RunKind.SFT, {})
    unlimited = StartTraining(resume=free.run_id)
    assert with_budget_left(workspace, unlimited, box(workspace)) == (unlimited, [])


def test_runs_whose_requests_name_one_another_in_a_circle_have_an_end(workspace):
    first = create_run(workspace, RunKind.SFT, {})
    second = create_run(workspace, RunKind.SFT, {"resume": first.run_id})
    asked = first.read_request()
    write_json(
        first.request_file, msgspec.structs.replace(asked, request={"resume": second.run_id})
    )
    again = StartTraining(resume=first.run_id)
    assert with_budget_left(workspace, again, box(workspace)) == (again, [])


@pytest.mark.parametrize("spent_usd", [0.98, 1.02])
def test_a_training_whose_budget_is_spent_goes_on_only_with_another(workspace, spent_usd):
    over = RemoteView(where="box", phase="over", machine_usd=spent_usd)
    spent = add_remote_run(workspace, over, status=RunStatus.INTERRUPTED, budget_usd=1.0)
    with pytest.raises(InputError, match=r"left of the budget of \$1 .* too little"):
        with_budget_left(workspace, StartTraining(resume=spent.run_id), box(workspace))


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "127.0.0.1",
        "127.1",
        "2130706433",
        "0x7f.1",
        "0",
        "[::1]",
        "[::]",
        "a.localhost",
    ],
)
def test_a_teacher_on_this_machine_is_refused_before_its_key_is_looked_at(workspace, host):
    url = f"http://{host}:8000/v1"
    request = GenerateRollouts(
        input="prompts.jsonl", model="t", base_url=url, api_key_env="SOME_KEY", where="box"
    )
    with pytest.raises(InputError, match=r"a loopback address"):
        resolve_machine(workspace, request)


def test_all_runs_on_a_machine_stay_within_its_own_budget(workspace):
    own_machine("box: {ssh: me@gpu.test, price_per_hour: 2, budget_usd: 10}")
    machine = box(workspace)
    add_remote_run(
        workspace,
        RemoteView(where="box", phase="over", machine_usd=2.5),
        machine=machine,
        metrics={"cost_usd": 0.5},
        budget_usd=9.0,
    )
    # One that is on it may still cost all of its budget; other machines have their own.
    add_remote_run(
        workspace,
        RemoteView(where="box", phase="running", machine_usd=1.0),
        machine=machine,
        budget_usd=4.0,
    )
    add_remote_run(workspace, RemoteView(where="gpu-box", phase="over", machine_usd=50.0))

    def budget(asked: float | None = None, num_runs: int = 1) -> tuple[float | None, str]:
        job = pack_job(workspace, machine, Needs, budget_usd=asked, num_runs=num_runs)
        assert job is not None
        return job.spec.budget_usd, "".join(job.notes)

    assert budget(2.0) == (2.0, "")
    note = "this run may cost up to $3.00, the rest of the budget of $10 for box"
    assert budget() == (3.0, note)
    assert budget(8.0)[0] == 3.0
    assert budget(None, 3)[0] == pytest.approx(1.0)
    add_remote_run(
        workspace, RemoteView(where="box", phase="waiting"), machine=machine, budget_usd=3.0
    )
    with pytest.raises(InputError, match=r"have used or reserved \$10\.00"):
        budget(1.0)


def test_a_run_without_a_budget_says_what_it_may_cost(workspace):
    spec = pack_job(workspace, box(workspace), Needs)
    assert spec is not None
    [note] = spec.notes
    assert note.startswith("no budget_usd: this run may cost up to $48.00 on box (max_hours: 24")
    capped = pack_job(workspace, box(workspace), Needs, budget_usd=1)
    assert capped is not None
    assert capped.notes == []
