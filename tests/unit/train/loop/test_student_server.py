"""The student sampled by a vLLM server, which is handed each iteration's adapter."""

from dataclasses import replace

import pytest
from transformers import AutoModelForImageTextToText

from fakes.model_server import FakeModelServer
from fakes.multimodal import save_multimodal
from fakes.training import PRICE_TOOL, make_project
from stillroom.errors import ConfigError, RunError
from stillroom.models.load import load_model
from stillroom.models.resolve import ModelLocation
from stillroom.train.config.request import PlanTraining, plan_request


def distill(tmp_path, start, teacher, server, **sections):
    project = make_project(
        tmp_path,
        "distill",
        start,
        **{
            "model": {"qlora_rank": 4},
            "data": {"batch_size": 4, "group_size": 2},
            "teacher": {"path": str(teacher)},
            "rollout": {"max_tokens": 8, "server": {"base_url": server.base_url}},
            "algorithm": {"loss_fn": "importance_sampling"},
            "trainer": {"learning_rate": 1e-1, "schedule": "constant"},
            **sections,
        },
    )
    project.write([{"prompt": f"Item {i}?"} for i in range(12)])
    return project


def test_what_the_server_samples_is_what_is_trained_and_each_adapter_is_its_own(
    tmp_path, tiny_models
):
    start = tiny_models.folder("llama", "chatml")
    with FakeModelServer(tiny_models.load("llama", "chatml")) as server:
        project = distill(tmp_path, start, tiny_models.folder("llama", "chatml", seed=1), server)
        project.train()
        left = dict(server.models)

    measured = project.reporter.measured
    # A server that samples older weights than the trainer's would show a gap from the second on.
    assert len(measured) == 3
    assert all(metrics["logprob_gap"] < 1e-5 for metrics in measured)
    assert all(metrics["failed"] == 0 for metrics in measured)
    loaded = [
        body["lora_name"] for path, body in server.requested if path.endswith("/load_lora_adapter")
    ]
    assert len(set(loaded)) == 3
    assert list(left) == ["served"]
    assert list((tmp_path / "runs" / "run-1" / "adapters").iterdir()) == []


def test_a_server_of_a_whole_multimodal_model_gets_adapters_that_fit_it(tmp_path):
    start, teacher = (save_multimodal(tmp_path, "gemma3", seed=seed) for seed in (0, 1))
    part = load_model(None, ModelLocation("gemma3", str(start), is_local=True))
    whole = AutoModelForImageTextToText.from_pretrained(start).eval()
    with FakeModelServer(replace(part, model=whole)) as server:
        project = distill(tmp_path, start, teacher, server)
        project.train()

    measured = project.reporter.measured
    assert len(measured) == 3
    assert all(metrics["logprob_gap"] < 1e-4 for metrics in measured)
    assert all(metrics["failed"] == 0 for metrics in measured)


def test_tokens_of_tools_are_appended_to_the_very_tokens_that_were_sampled(tmp_path, tiny_models):
    clerk = tiny_models.folder("llama", "clerk")
    with FakeModelServer(tiny_models.load("llama", "clerk")) as server:
        project = distill(
            tmp_path,
            clerk,
            clerk,
            server,
            rollout={"max_tokens": 8, "max_turns": 4, "server": {"base_url": server.base_url}},
            trainer={"learning_rate": 1e-6, "max_steps": 1},
        )
        (tmp_path / "tools.py").write_text(PRICE_TOOL, encoding="utf-8")
        project.train()

    (metrics,) = project.reporter.measured
    assert metrics["turns"] > 1
    assert metrics["response_tokens"] == pytest.approx(2 * metrics["turns"])
    assert metrics["logprob_gap"] < 1e-5
    requested = [body["prompt"] for path, body in server.requested if path == "/v1/completions"]
    longer = [
        ids for ids in requested if any(ids[: len(o)] == o and len(ids) > len(o) for o in requested)
    ]
    assert longer


def test_ids_are_read_as_older_servers_give_them(tmp_path, tiny_models):
    def shown(path, answer):
        if path == "/v1/completions":
            for key in ("token_ids", "prompt_token_ids"):
                del answer["choices"][0][key]
        return answer

    start = tiny_models.folder("llama", "chatml")
    with FakeModelServer(tiny_models.load("llama", "chatml"), shown=shown) as server:
        project = distill(tmp_path, start, start, server, trainer={"max_steps": 1})
        project.train()

    assert project.reporter.measured[0]["logprob_gap"] < 1e-5


def test_a_server_that_loads_no_adapters_is_told_how_to_be_started(tmp_path, tiny_models):
    start = tiny_models.folder("llama", "chatml")
    with FakeModelServer(tiny_models.load("llama", "chatml"), has_lora=False) as server:
        project = distill(tmp_path, start, start, server)
        with pytest.raises(RunError, match="does not load adapters") as caught:
            project.train()
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in caught.value.fix
    assert "--max-lora-rank 8" in caught.value.fix
    assert list((tmp_path / "runs" / "run-1" / "adapters").iterdir()) == []


def test_all_weights_cannot_be_handed_to_a_server(tmp_path, tiny_models):
    start = tiny_models.folder("llama", "chatml")
    with FakeModelServer(tiny_models.load("llama", "chatml")) as server:
        project = distill(tmp_path, start, start, server, model={"qlora_rank": 0})
    project.write_config()

    with pytest.raises(ConfigError, match="not full weights"):
        plan_request(project.workspace, PlanTraining())
