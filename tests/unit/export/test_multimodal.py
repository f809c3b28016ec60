"""Exports of trained text parts, back into the multimodal models that they belong to."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from fakes.llama_cpp import read_gguf, write_checkout
from fakes.multimodal import FAMILIES, picture, save_multimodal
from fakes.reporters import KeptReporter
from stillroom.errors import InputError, ModelError
from stillroom.export.request import ExportModel
from stillroom.export.run import export_model
from stillroom.files import write_json
from stillroom.models.load import load_model, load_tokenizer, read_weights
from stillroom.models.multimodal import language_model_name
from stillroom.models.resolve import RECORD, CheckpointRecord, ModelLocation, identify, locate_model
from stillroom.settings import Workspace
from stillroom.trace.request import ShowLineage
from stillroom.trace.show import show_lineage

IDS = torch.arange(30, 70)[None]


def local(folder):
    return ModelLocation(folder.name, str(folder), is_local=True)


@torch.no_grad()
def logits(model, ids=IDS, **more):
    return model(input_ids=ids, **more).logits


@torch.no_grad()
def learnt(base, folder):
    """Saves a checkpoint of all weights of a multimodal model's text part, and returns it."""
    part = read_weights(local(base), dtype="auto").eval()
    torch.manual_seed(1)
    for name, weight in part.named_parameters():
        if "layers.1" in name and name.endswith("proj.weight"):
            weight.add_(torch.randn_like(weight) * 0.1)
    part.save_pretrained(folder)
    load_tokenizer(local(base)).save_pretrained(folder)
    record = CheckpointRecord(
        run_id="run-1",
        method="sft",
        step=1,
        base_model=str(base),
        text_part_of=identify(Workspace(base.parent), local(base), role="multimodal"),
    )
    write_json(folder / RECORD, record)
    return part


def export(root, **fields):
    run = root / "runs" / "export-1"
    run.mkdir(parents=True, exist_ok=True)
    request = ExportModel(**{"model": "checkpoint", "output": "out", **fields})
    return export_model(Workspace(root), request, folder=run, reporter=KeptReporter())


def features(model, name):
    with torch.no_grad():
        return model.get_image_features(**picture(name)).last_hidden_state


@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_text_part_goes_back_into_its_multimodal_model(tmp_path, name):
    base = save_multimodal(tmp_path, name)
    part = learnt(base, tmp_path / "checkpoint")

    result = export(tmp_path)

    out = tmp_path / "out"
    before, after = (load_file(folder / "model.safetensors") for folder in (base, out))
    assert before.keys() == after.keys()
    changed = [key for key in before if not torch.equal(before[key], after[key])]
    assert changed
    assert all(".layers.1." in language_model_name(key) for key in changed)
    assert not [key for key in changed if "visi" in key or "visual" in key]
    for file in ("config.json", "tokenizer.json", "preprocessor_config.json",
                 "processor_config.json", "chat_template.jinja"):  # fmt: skip
        assert (out / file).read_bytes() == (base / file).read_bytes()
    assert result.read_back.kl < 1e-6
    assert "copied unchanged from" in result.other_parts
    assert torch.equal(logits(load_model(None, local(out)).model), logits(part))
    if name != "gemma3n":
        original = AutoModelForImageTextToText.from_pretrained(base).eval()
        whole = AutoModelForImageTextToText.from_pretrained(out).eval()
        assert torch.equal(logits(whole), logits(part))
        assert torch.equal(features(whole, name), features(original, name))


def test_shards_stay_as_the_original_has_them(tmp_path):
    base = save_multimodal(tmp_path, "qwen3_vl")
    whole = AutoModelForImageTextToText.from_pretrained(base)
    (base / "model.safetensors").unlink()
    whole.save_pretrained(base, max_shard_size="60KB")
    part = learnt(base, tmp_path / "checkpoint")

    export(tmp_path)

    shards = {path.name for path in base.glob("*.safetensors")}
    assert len(shards) > 1
    assert {path.name for path in (tmp_path / "out").glob("*.safetensors")} == shards
    index = "model.safetensors.index.json"
    before, after = (json.loads((f / index).read_bytes()) for f in (base, tmp_path / "out"))
    assert before["weight_map"] == after["weight_map"]
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits(again), logits(part))


def test_weights_that_were_not_trained_keep_their_bytes_also_in_another_format(tmp_path):
    base = save_multimodal(tmp_path, "gemma3")
    whole = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.bfloat16)
    whole.save_pretrained(base)
    part = learnt(base, tmp_path / "checkpoint")
    part.float().save_pretrained(tmp_path / "checkpoint")

    export(tmp_path)

    before, after = (load_file(f / "model.safetensors") for f in (base, tmp_path / "out"))
    differ = {name for name in before if before[name].dtype != after[name].dtype}
    assert differ
    assert all(".layers.1." in name and name.endswith("proj.weight") for name in differ)


def test_gguf_is_made_of_the_whole_model_and_says_that_it_holds_the_text(tmp_path):
    base = save_multimodal(tmp_path, "qwen3_vl")
    learnt(base, tmp_path / "checkpoint")
    write_checkout(tmp_path / "llama.cpp")

    result = export(tmp_path, format="gguf", llama_cpp="llama.cpp")

    _, seen = read_gguf(tmp_path / "out" / "out.gguf")
    assert {"config.json", "preprocessor_config.json", "model.safetensors"} <= set(seen)
    assert "the GGUF file contains the text part of qwen3_vl-chatml-0" in result.other_parts
    assert "--mmproj" in (tmp_path / "out" / "README.md").read_text("utf-8")


@torch.no_grad()
def adapted(base, folder):
    """Saves an adapter on a multimodal model's text part as training does, and returns it."""
    torch.manual_seed(2)
    targets = ["q_proj", "down_proj"]
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(read_weights(local(base), dtype="auto"), config).eval()
    model.save_pretrained(folder, save_embedding_layers=False)
    load_tokenizer(local(base)).save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", ["gemma3", "llama4"])
def test_an_adapter_is_merged_into_the_multimodal_model_or_written_for_it(tmp_path, name):
    base = save_multimodal(tmp_path, name)
    meant = logits(adapted(base, tmp_path / "checkpoint"))

    result = export(tmp_path, format="adapter", output="apart")
    export(tmp_path)

    whole = AutoModelForImageTextToText.from_pretrained(base).eval()
    apart = PeftModel.from_pretrained(whole, tmp_path / "apart").eval()
    assert torch.allclose(logits(apart), meant, atol=1e-4)
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "out").eval()
    assert torch.allclose(logits(merged), meant, atol=1e-4)
    assert result.other_parts == f"the adapter changes only the text part of {base.name}"
    card = (tmp_path / "apart" / "README.md").read_text("utf-8")
    assert "PeftModel.from_pretrained(base" in card
    ours = load_model(Workspace(tmp_path), locate_model(Workspace(tmp_path), "apart")).model
    assert torch.allclose(logits(ours), meant, atol=1e-4)


def test_an_adapter_that_changes_the_vision_tower_is_not_merged_without_it(tmp_path):
    base = save_multimodal(tmp_path, "gemma3")
    torch.manual_seed(2)
    whole = AutoModelForImageTextToText.from_pretrained(base)
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(whole, config).save_pretrained(tmp_path / "checkpoint")
    load_tokenizer(local(base)).save_pretrained(tmp_path / "checkpoint")

    with pytest.raises(
        ModelError, match="also changes other parts of a multimodal model"
    ) as caught:
        export(tmp_path)
    assert "format adapter" in caught.value.fix


@pytest.mark.parametrize("model_format", ["merged", "gguf"])
def test_a_multimodal_model_that_is_gone_is_named_and_the_text_alone_can_be_exported(
    tmp_path, model_format
):
    base = save_multimodal(tmp_path, "qwen3_vl")
    part = learnt(base, tmp_path / "checkpoint")
    shutil.rmtree(base)
    options = {"llama_cpp": "."} if model_format == "gguf" else {}
    (tmp_path / "convert_hf_to_gguf.py").touch()

    with pytest.raises(InputError, match="no longer exists") as caught:
        export(tmp_path, format=model_format, **options)
    assert "format text" in caught.value.fix
    result = export(tmp_path, format="text")

    assert result.other_parts.startswith("left out: ")
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits(text), logits(part))
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert "left out: this is only the text part of qwen3_vl-chatml-0" in card
    assert "pipeline_tag: text-generation" in card


def test_a_multimodal_model_that_has_changed_is_refused(tmp_path):
    base = save_multimodal(tmp_path, "gemma3")
    learnt(base, tmp_path / "checkpoint")
    (base / "preprocessor_config.json").write_text("{}", encoding="utf-8")

    with pytest.raises(ModelError, match="has changed since") as caught:
        export(tmp_path)
    assert "format text" in caught.value.fix


def test_the_card_and_the_lineage_name_the_multimodal_model(tmp_path):
    base = save_multimodal(tmp_path, "mistral3")
    learnt(base, tmp_path / "checkpoint")

    result = export(tmp_path)

    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert (
        "| other parts | multi_modal_projector, vision_tower: 15 weights, copied unchanged" in card
    )
    assert "AutoModelForImageTextToText.from_pretrained" in card
    assert "pipeline_tag: image-text-to-text" in card
    assert str(tmp_path) not in card
    assert result.other_parts.endswith("from mistral3-chatml-0")
    lineage = show_lineage(Workspace(tmp_path), ShowLineage(path="out"))
    assert lineage.problems == []
