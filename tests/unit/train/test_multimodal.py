"""Training on multimodal checkpoints: only their text part is trained, and it can be resumed."""

import functools
import json
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from fakes.conversations import answer, user
from fakes.multimodal import save_multimodal
from fakes.reporters import KeptReporter
from fakes.training import make_project
from fakes.waiting import run_async
from stillroom.errors import ModelError
from stillroom.evaluate.request import EvaluateModel
from stillroom.evaluate.run import evaluate_model
from stillroom.export.request import ExportModel
from stillroom.export.run import export_model
from stillroom.lineage import record_folder
from stillroom.models.load import load_model
from stillroom.models.multimodal import convert_to_multimodal
from stillroom.models.resolve import ModelLocation, locate_model

ROWS = [{"messages": [user(f"Item {i}?"), answer(f"It costs {i}.")]} for i in range(12)]
IDS = torch.arange(30, 60)[None]


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


def ours(project, name):
    return logits(load_model(project.workspace, locate_model(project.workspace, name)).model)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    return save_multimodal(tmp_path_factory.mktemp("bases"), "gemma3")


def sft(root, start, rank):
    trainer = {"learning_rate": 1e-2, "save_step": 1}
    project = make_project(root, "sft", start, model={"qlora_rank": rank}, trainer=trainer)
    project.write(ROWS)
    return project


@pytest.mark.parametrize("rank", [0, 4], ids=["all weights", "lora"])
def test_the_text_part_is_trained_and_resumed_bit_for_bit(tmp_path, gemma, rank):
    project = sft(tmp_path, gemma, rank)
    project.train()
    shutil.rmtree(project.checkpoint())
    at_two = ours(project, "runs/run-1/checkpoints/step_000002")

    project.train("run-2", resume="run-1")
    project.train("run-3")

    assert torch.equal(ours(project, "run-2"), ours(project, "run-3"))
    assert not torch.allclose(at_two, ours(project, "run-2"), atol=1e-3)
    weights = load_file(next(project.checkpoint(run="run-2").glob("*model.safetensors")))
    assert not [name for name in weights if "vision" in name or "projector" in name]


def test_a_checkpoint_names_the_multimodal_model_whose_text_part_it_is(tmp_path, gemma):
    first = sft(tmp_path, gemma, 0)
    first.train()
    second = sft(tmp_path, first.checkpoint(), 4)
    second.train("run-2")

    records = [json.loads((p / "stillroom.json").read_text("utf-8"))["text_part_of"]
               for p in (first.checkpoint(), second.checkpoint(run="run-2"))]  # fmt: skip

    assert records[0] == records[1]
    assert records[0]["location"] == str(gemma)
    assert records[0]["sha256"] == record_folder(gemma).sha256


def test_an_adapter_on_many_layers_is_never_put_on_the_vision_tower(tmp_path):
    types = ["sliding_attention"] * 3
    base = save_multimodal(tmp_path, "gemma3", num_hidden_layers=3, layer_types=types)
    project = sft(tmp_path, base, 4)
    project.train()
    run = tmp_path / "runs" / "export-1"
    run.mkdir()
    request = ExportModel(model="run-1", output="out", format="adapter")
    export_model(project.workspace, request, folder=run, reporter=KeptReporter())

    whole = AutoModelForImageTextToText.from_pretrained(base).eval()
    config = json.loads((project.checkpoint() / "adapter_config.json").read_text("utf-8"))
    # As many as peft would shorten to the ends that their names have in common.
    assert len(config["target_modules"]) == 21
    with pytest.raises(ValueError, match="not found in the base model"):
        PeftModel.from_pretrained(whole, project.checkpoint())
    adapted = PeftModel.from_pretrained(whole, tmp_path / "out").eval()
    layers = [name for name, _ in adapted.named_modules() if name.endswith("lora_A")]
    assert len(layers) == 21
    assert all(".language_model." in name for name in layers)
    assert torch.allclose(logits(adapted), ours(project, "run-1"), atol=1e-4)


def tokenizer_beside(adapter, base):
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(base / file, adapter)


@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl", "llama4"])
def test_an_adapter_goes_between_the_text_part_and_the_whole_model(tmp_path, name):
    base = save_multimodal(tmp_path, name)
    torch.manual_seed(0)
    part = load_model(None, ModelLocation(name, str(base), is_local=True)).model
    head = [] if part.config.tie_word_embeddings else ["lm_head"]
    targets = ["q_proj", "down_proj", *head]
    meant = get_peft_model(
        part, LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    ).eval()
    meant.save_pretrained(tmp_path / "apart", save_embedding_layers=False)
    tokenizer_beside(tmp_path / "apart", base)

    convert_to_multimodal(tmp_path / "apart", name)

    whole = AutoModelForImageTextToText.from_pretrained(base).eval()
    adapted = PeftModel.from_pretrained(whole, tmp_path / "apart").eval()
    assert torch.allclose(logits(adapted), logits(meant), atol=1e-4)
    changed = [n for n, _ in adapted.named_modules() if n.endswith("lora_A")]
    assert len(changed) == len([n for n, _ in meant.named_modules() if n.endswith("lora_A")])
    project = make_project(tmp_path, "sft", base)
    assert torch.allclose(ours(project, "apart"), logits(meant), atol=1e-4)


def test_an_adapter_on_a_whole_model_from_elsewhere_is_taken_for_its_text_part(tmp_path, gemma):
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_pretrained(gemma)
    config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    adapted = get_peft_model(whole, config).eval()
    adapted.save_pretrained(tmp_path / "theirs")
    tokenizer_beside(tmp_path / "theirs", gemma)
    project = sft(tmp_path, gemma, 4)

    assert torch.allclose(ours(project, "theirs"), logits(adapted), atol=1e-4)


def test_an_adapter_of_another_model_is_refused_and_not_run_as_nothing(tmp_path, gemma):
    project = sft(tmp_path, gemma, 4)
    project.train()
    file = project.checkpoint() / "adapter_model.safetensors"
    renamed = {n.replace("self_attn", "attention"): t for n, t in load_file(file).items()}
    save_file(renamed, file, metadata={"format": "pt"})

    with pytest.raises(ModelError, match="the files of the adapter 'run-1' lack"):
        ours(project, "run-1")


def test_a_run_that_trained_a_whole_model_is_not_resumed_on_its_text_part(tmp_path, gemma):
    project = sft(tmp_path, gemma, 4)
    project.train()
    for name in project.checkpoints():
        if name == "final":
            continue
        file = project.checkpoint(name) / "adapter_config.json"
        convert_to_multimodal(file.parent, "gemma3")
        config = json.loads(file.read_text("utf-8"))
        leaves = sorted({module.rpartition(".")[2] for module in config["target_modules"]})
        file.write_text(json.dumps({**config, "target_modules": leaves}), encoding="utf-8")
    shutil.rmtree(project.checkpoint())

    with pytest.raises(ModelError, match="is of a whole multimodal model") as caught:
        project.train("run-2", resume="run-1")
    assert "model.path" in caught.value.fix


def test_a_multimodal_model_is_distilled_exported_evaluated_and_distilled_again(tmp_path):
    base, teacher = (save_multimodal(tmp_path, "qwen3_5", seed=seed) for seed in (0, 1))
    project = make_project(
        tmp_path,
        "distill",
        base,
        model={"qlora_rank": 4},
        data={"batch_size": 2, "group_size": 2},
        teacher={"path": str(teacher)},
        rollout={"max_tokens": 6},
        trainer={"learning_rate": 1e-2},
    )
    project.write([{"prompt": f"Item {i}?"} for i in range(4)])
    project.train()
    workspace, folder = project.workspace, tmp_path / "runs" / "later"
    folder.mkdir()
    given = {"folder": folder, "reporter": project.reporter}

    exported = export_model(workspace, ExportModel(model="run-1", output="out"), **given)
    project.write([{"prompt": "Which?", "metadata": {"expected_answer": "12"}}], name="held.jsonl")
    request = EvaluateModel(data="held.jsonl", model="out", max_tokens=6, teacher=str(teacher))
    evaluated = run_async(functools.partial(evaluate_model, workspace, request, **given))
    project.config["model"]["path"] = "out"
    project.train("run-2")

    assert exported.read_back.kl < 1e-6
    assert (evaluated.accuracy.n, evaluated.teacher) == (1, str(teacher))
    assert torch.allclose(ours(project, "out"), ours(project, "run-1"), atol=1e-4)
    assert len(project.reporter.measured) >= 4
    assert all(m["logprob_gap"] < 1e-4 for m in project.reporter.measured if "logprob_gap" in m)
    record = locate_model(workspace, "run-2").record
    assert record.text_part_of.location == str(tmp_path / "out")
