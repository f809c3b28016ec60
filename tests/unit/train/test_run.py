import json
import math

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from fakes.conversations import answer, user
from fakes.families import save_family
from fakes.reporters import KeptReporter
from fakes.tiny_models import build_tokenizer
from fakes.training import make_project
from stillroom.errors import ModelError, RunCancelledError
from stillroom.lineage import read_manifest, record_file, record_folder
from stillroom.models.load import load_model, load_weights
from stillroom.models.resolve import ModelLocation, locate_model
from stillroom.versions import tag_file

SFT_ROWS = [{"messages": [user(f"Item {i}?"), answer(f"It costs {i}.")]} for i in range(10)]
DPO_ROWS = [
    {
        "prompt": [user(f"Item {i}?")],
        "chosen": [answer(f"It costs {i}.")],
        "rejected": [answer("No.")],
    }
    for i in range(6)
]
IDS = torch.arange(12)[None]


@pytest.fixture
def llama(tiny_models):
    return tiny_models.folder("llama", "chatml")


def sft(tmp_path, start, rows=SFT_ROWS, **sections):
    project = make_project(tmp_path, "sft", start, **sections)
    project.write(rows)
    return project


def dpo(tmp_path, start, **sections):
    project = make_project(tmp_path, "dpo", start, **sections)
    project.write(DPO_ROWS)
    return project


@torch.no_grad()
def logits(model):
    return model.eval()(IDS).logits


def test_a_run_says_what_it_leaves_out_and_which_fast_way_it_cannot_take(tmp_path, tiny_models):
    project = sft(tmp_path, save_family(tiny_models.root, "qwen2-moe"), rows=SFT_ROWS[:4])

    project.train()

    [padded, unbalanced, *_] = project.reporter.notes
    assert padded.startswith(
        "rows of Qwen2MoeForCausalLM are padded to the longest row of their pass"
    )
    assert unbalanced.startswith("the loss has no load-balancing term for the experts")


def test_sft_reports_every_step_and_lowers_the_loss(tmp_path, llama):
    project = sft(tmp_path, llama, trainer={"num_epochs": 3, "learning_rate": 1e-2})

    result = project.train()

    measured = project.reporter.measured
    assert result.steps == 9
    assert result.rows == 10
    assert result.skipped == {}
    assert project.reporter.progressed == [(step, 9) for step in range(1, 10)]
    epochs = [0.3333, 0.6667, 1, 1.3333, 1.6667, 2, 2.3333, 2.6667, 3]
    assert [metrics["epoch"] for metrics in measured] == epochs
    assert measured[-1]["loss"] < measured[0]["loss"] / 2
    assert measured[0]["learning_rate"] == 1e-2
    assert all(metrics["grad_norm"] > 0 for metrics in measured)
    assert result.metrics == measured[-1]
    assert result.trained_tokens > 0
    assert 0 < result.parameters < 1e7
    assert result.checkpoint == "runs/run-1/checkpoints/final"


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_a_full_checkpoint_is_an_ordinary_model_for_transformers(
    tmp_path, tiny_models, architecture
):
    project = sft(tmp_path, tiny_models.folder(architecture, "chatml"))

    project.train()

    folder = project.checkpoint()
    plain = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ours = load_model(project.workspace, locate_model(project.workspace, "run-1"))
    assert torch.equal(logits(plain), logits(ours.model))
    assert not torch.allclose(
        logits(plain), logits(tiny_models.load(architecture).model), atol=1e-3
    )
    assert tokenizer.chat_template == ours.tokenizer.chat_template
    assert tokenizer.get_vocab() == ours.tokenizer.get_vocab()


def test_an_adapters_checkpoint_is_an_ordinary_adapter_for_peft(tmp_path, tiny_models, llama):
    project = sft(tmp_path, llama, model={"qlora_rank": 4}, trainer={"learning_rate": 1e-2})

    project.train()

    folder = project.checkpoint()
    assert not (folder / "model.safetensors").exists()
    plain = AutoPeftModelForCausalLM.from_pretrained(folder)
    ours = load_model(project.workspace, locate_model(project.workspace, "run-1"))
    assert torch.allclose(logits(plain), logits(ours.model), atol=1e-4)
    assert not torch.allclose(logits(plain), logits(tiny_models.load("llama").model), atol=1e-3)


def test_a_checkpoint_holds_the_hashes_of_what_it_was_trained_on(tmp_path, llama):
    project = sft(tmp_path, llama, trainer={"save_step": 2})

    project.train()

    used = [record_file(tmp_path / name) for name in ("config.yml", "train.jsonl")]
    (tmp_path / "train.jsonl").write_text("", encoding="utf-8")
    for name, step in (("step_000002", 2), ("final", 3)):
        manifest = read_manifest(project.checkpoint(name))
        assert manifest is not None
        assert manifest.inputs == used
        assert manifest.output == record_folder(project.checkpoint(name))
        assert (manifest.run_id, manifest.counts) == ("run-1", {"step": step})
        (student,) = manifest.models
        assert (student.role, student.sha256) == ("student", record_folder(llama).sha256)
    assert load_model(project.workspace, locate_model(project.workspace, "run-1"))


def test_a_tagged_version_of_the_rows_is_trained_on(tmp_path, llama):
    project = sft(tmp_path, llama, data={"train_file": "train@v1"})
    tag_file(tmp_path, tmp_path / "train.jsonl", "v1", created_at="", manifest=None)
    project.write(SFT_ROWS[:1])

    assert project.train().rows == 10


def test_a_cancelled_run_leaves_a_checkpoint_of_the_step_it_reached(tmp_path, llama):
    project = sft(tmp_path, llama, data={"batch_size": 2})
    project.reporter = KeptReporter(lambda: len(project.reporter.measured) >= 3)

    with pytest.raises(RunCancelledError):
        project.train()

    assert project.checkpoints() == ["step_000003"]
    load_weights(ModelLocation("c", str(project.checkpoint("step_000003")), is_local=True))
    with pytest.raises(ModelError, match="checkpoints/step_000003, as the model"):
        locate_model(project.workspace, "run-1")


def test_an_adapter_is_trained_on_and_stays_an_adapter_of_the_same_base(tmp_path, llama):
    project = sft(tmp_path, llama, model={"qlora_rank": 4}, trainer={"learning_rate": 1e-2})
    project.train("run-1")
    trained = project.reporter.measured[-1]["loss"]

    project.train("run-2", "model.path=run-1")

    assert project.reporter.measured[3]["loss"] < project.reporter.measured[0]["loss"]
    assert project.reporter.measured[3]["loss"] == pytest.approx(trained, rel=0.5)
    path = project.checkpoint("final", "run-2") / "stillroom.json"
    assert json.loads(path.read_text(encoding="utf-8"))["base_model"] == str(llama)
    load_model(project.workspace, locate_model(project.workspace, "run-2"))


def test_held_out_pairs_are_measured_after_every_epoch_and_not_trained(tmp_path, llama):
    project = dpo(tmp_path, llama, data={"val_split": 0.3}, trainer={"num_epochs": 4})
    project.config["trainer"]["learning_rate"] = 1e-2

    result = project.train()

    assert result.rows == 4
    validated = [m for m in project.reporter.measured if "val_loss" in m]
    assert len(validated) == result.steps == 4
    assert validated[-1]["val_loss"] < validated[0]["val_loss"] < math.log(2)
    assert validated[-1]["val_pair_accuracy"] == 1.0


def test_thinking_is_trained_only_where_it_is_asked_for(tmp_path, tiny_models):
    thought = answer("It costs 1.", reasoning_content="one and nothing else")
    rows = [{"messages": [user("Item 1?"), thought]}]
    project = sft(tmp_path, tiny_models.folder("llama", "qwen3"), rows)

    without = project.train("run-1")
    thinking = project.train("run-2", "rollout.include_thinking=true")

    num_tokens = len(build_tokenizer("qwen3").encode("one and nothing else"))
    assert thinking.trained_tokens == pytest.approx(without.trained_tokens + num_tokens, abs=2)


def test_dpo_begins_at_ln_2_and_learns_the_preference(tmp_path, llama):
    project = dpo(tmp_path, llama, trainer={"num_epochs": 4, "learning_rate": 1e-2})

    result = project.train()

    measured = project.reporter.measured
    assert measured[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert measured[0]["margin"] == pytest.approx(0.0, abs=1e-4)
    assert measured[-1]["loss"] < 0.3
    assert measured[-1]["pair_accuracy"] == 1.0
    assert (result.steps, result.rows, result.method) == (8, 6, "dpo")


def test_dpo_from_an_adapter_takes_that_adapter_as_its_reference(tmp_path, llama):
    sft(tmp_path, llama, model={"qlora_rank": 4}, trainer={"learning_rate": 1e-2}).train("run-1")
    project = dpo(tmp_path, llama, model={"qlora_rank": 4, "path": "run-1"})

    project.train("run-2")

    assert project.reporter.measured[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)


@pytest.mark.parametrize("rank", [0, 4])
def test_dropout_of_the_model_does_not_blur_the_preference(tmp_path, tiny_models, rank):
    folder = tiny_models.folder("llama", "chatml", attention_dropout=0.5)
    project = dpo(tmp_path, folder, model={"qlora_rank": rank})

    project.train()

    assert project.reporter.measured[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
