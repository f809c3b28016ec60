import json
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3Config

from fakes import chat_templates
from fakes.families import ORIGINAL_CONTEXT, build_family
from fakes.tiny_models import build_tokenizer
from stillroom.data.chat.template import template_file
from stillroom.errors import ModelError
from stillroom.files import write_json
from stillroom.models.chat_template import template_source
from stillroom.models.load import (
    context_length,
    load_adapter,
    load_model,
    load_tokenizer,
    load_weights,
    stop_token_ids,
)
from stillroom.models.resolve import RECORD, CheckpointRecord, ModelLocation, adapter_base


def local(folder):
    return ModelLocation(folder.name, str(folder), is_local=True)


@pytest.fixture
def copied(tiny_models, tmp_path):
    """A copy of a saved model that a test may damage."""
    return shutil.copytree(tiny_models.folder("llama", "chatml"), tmp_path / "llama")


@pytest.fixture
def lora_folder(tiny_models, tmp_path):
    """An adapter whose weights are not zero, as other programs write it."""
    base = tiny_models.folder("llama", "chatml")
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(load_weights(local(base)), config)
    model.save_pretrained(tmp_path / "lora")
    build_tokenizer("chatml").save_pretrained(tmp_path / "lora")
    return tmp_path / "lora"


def logits(model):
    with torch.no_grad():
        return model(torch.arange(5)[None]).logits


def test_a_tokenizer_with_tokens_that_the_model_has_none_for_is_refused(tiny_models, copied):
    tokenizer = build_tokenizer("chatml")
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(copied)
    # Nothing that is said needs the token, as text needs none of Gemma 3's image tokens.
    loaded = load_model(tiny_models.workspace, local(copied))
    with pytest.raises(ModelError, match=r"352 tokens, but a row needs token 352, '<new>'"):
        loaded.check_ids([[3, 352], [4]], "a row")

    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_start|>", "<new>")
    tokenizer.save_pretrained(copied)

    with pytest.raises(ModelError, match=r"its chat template needs token 352") as caught:
        load_model(tiny_models.workspace, local(copied))
    assert "model.resize_token_embeddings(353)" in caught.value.fix


def test_a_turn_ends_with_the_models_own_ends_and_with_its_templates(tiny_models):
    loaded = tiny_models.load("llama", "chatml")
    tokenizer = loaded.tokenizer
    text_end, turn_end = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    # As base models come: their tokenizer's end is the end of a document.
    tokenizer.eos_token = "<|endoftext|>"
    loaded.model.generation_config.eos_token_id = [text_end]

    assert stop_token_ids(loaded.model, tokenizer) == {text_end, turn_end}


def test_the_context_of_a_model_with_pictures_is_that_of_its_text_part(tmp_path):
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    text = {**small, **heads, "vocab_size": 352, "max_position_embeddings": 96}
    vision = {**small, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, image_token_index=3)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "both")
    build_tokenizer("gemma").save_pretrained(tmp_path / "both")

    assert load_model(None, local(tmp_path / "both")).max_context == 96


def test_an_adapter_is_merged_into_its_base(tiny_models, lora_folder):
    loaded = load_model(tiny_models.workspace, local(lora_folder))
    apart = load_adapter(tiny_models.workspace, local(lora_folder))

    base = tiny_models.load("llama", "chatml").model
    assert type(loaded.model) is type(base)
    assert torch.allclose(logits(loaded.model), logits(apart), atol=1e-4)
    assert not torch.allclose(logits(loaded.model), logits(base), atol=1e-2)


def test_our_record_says_what_an_adapter_belongs_on(tiny_models, lora_folder):
    other = tiny_models.folder("llama", "chatml", seed=1)
    record = CheckpointRecord(run_id="r", method="sft", step=1, base_model=str(other))
    write_json(lora_folder / RECORD, record)

    assert adapter_base(tiny_models.workspace, local(lora_folder)).path == other


def test_a_tokenizer_without_a_chat_template_is_refused(copied):
    (copied / "chat_template.jinja").unlink()

    with pytest.raises(ModelError, match="has no chat template") as caught:
        load_tokenizer(local(copied))
    assert "chat_template.jinja" in caught.value.fix


def test_a_trained_model_that_knows_no_tools_may_get_a_template_that_has_them(copied, tiny_models):
    (copied / "chat_template.jinja").write_text(chat_templates.TOOLLESS, encoding="utf-8")
    write_json(copied / RECORD, {})
    template = template_source(tiny_models.workspace, "chatml")

    loaded = load_model(tiny_models.workspace, local(copied), template=template)

    assert loaded.tokenizer.chat_template == template_file("chatml").read_text("utf-8")


def test_several_chat_templates_are_refused_by_name(copied):
    (copied / "additional_chat_templates").mkdir()
    (copied / "additional_chat_templates" / "tool_use.jinja").write_text("x", encoding="utf-8")

    with pytest.raises(ModelError, match=r"several chat templates \(default, tool_use\)"):
        load_tokenizer(local(copied))


def truncate(path):
    path.write_bytes(path.read_bytes()[:400])


@pytest.mark.parametrize("file", ["tokenizer.json", "model.safetensors", "config.json"])
def test_a_damaged_file_is_an_error_that_names_the_folder(copied, file):
    truncate(copied / file)

    with pytest.raises(ModelError, match=r"cannot load the (model|tokenizer)") as caught:
        load_model(None, local(copied))
    assert str(copied) in caught.value.fix


def test_a_damaged_adapter_is_an_error_that_names_the_folder(tiny_models, lora_folder):
    truncate(lora_folder / "adapter_model.safetensors")

    with pytest.raises(ModelError, match="cannot load the adapter") as caught:
        load_model(tiny_models.workspace, local(lora_folder))
    assert str(lora_folder) in caught.value.fix


def test_pickled_weights_are_not_read(copied):
    weights = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    torch.save(weights, copied / "pytorch_model.bin")

    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_weights(local(copied))


def test_a_model_with_missing_weights_is_not_filled_up_with_random_ones(copied):
    weights = load_file(copied / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    del weights[name]
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(
        ModelError, match=f"the files of 'llama' lack 1 of its weights, e.g. {name}"
    ):
        load_weights(local(copied))


def test_weights_of_another_size_are_refused(copied):
    config = json.loads((copied / "config.json").read_text(encoding="utf-8"))
    (copied / "config.json").write_text(json.dumps({**config, "vocab_size": 300}), encoding="utf-8")

    with pytest.raises(ModelError, match="cannot load the model"):
        load_weights(local(copied))


def test_dynamic_rope_stretches_the_context():
    assert context_length(build_family("llama3")) == 512
    assert context_length(build_family("llama-dynamic")) == 20 * ORIGINAL_CONTEXT
