import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, ViTConfig

from fakes.families import FAMILIES as TEXTS
from fakes.multimodal import FAMILIES, build_whole_config, save_multimodal
from fakes.tiny_models import build_tokenizer
from stillroom.errors import ModelError
from stillroom.models.load import load_model, load_tokenizer, read_weights
from stillroom.models.multimodal import language_config, multimodal_config
from stillroom.models.resolve import ModelLocation
from stillroom.train.planning.weightless_models import empty_model


def local(folder):
    return ModelLocation(folder.name, str(folder), is_local=True)


@torch.no_grad()
def logits(model, ids):
    return model(input_ids=ids).logits


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The folder of the tiny multimodal models."""
    return tmp_path_factory.mktemp("multimodal")


@pytest.mark.parametrize("name", list(FAMILIES))
def test_the_text_part_says_of_text_what_the_whole_model_says(root, name, monkeypatch):
    if name == "gemma3n":
        # Its towers need a package of their own, and text does not reach them.
        build = AutoModel.from_config
        monkeypatch.setattr(
            AutoModel,
            "from_config",
            lambda config: build(config) if "text" in config.model_type else nn.Identity(),
        )
    folder = save_multimodal(root, name)
    whole = AutoModelForImageTextToText.from_pretrained(folder).eval()
    longest = max(TEXTS[FAMILIES[name].text].lengths)
    ids = torch.randint(30, 350, (2, longest), generator=torch.Generator().manual_seed(0))

    part = read_weights(local(folder), dtype="auto").eval()

    assert torch.equal(logits(part, ids), logits(whole, ids))
    assert all(n.startswith(("model.", "lm_head.")) for n, _ in part.named_parameters())
    assert part.num_parameters() < whole.num_parameters()


@pytest.mark.parametrize("name", ["qwen3_5", "qwen2_5_vl", "gemma3", "llama4"])
def test_a_saved_text_part_is_a_language_model_of_its_own(root, tmp_path, name):
    part = read_weights(local(save_multimodal(root, name)), dtype="auto").eval()

    part.save_pretrained(tmp_path)

    ids = torch.arange(40, 60)[None]
    assert multimodal_config(local(tmp_path)) is None
    own = ("model.layers.", "model.embed", "model.norm", "lm_head.")
    assert all(name.startswith(own) for name in load_file(tmp_path / "model.safetensors"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(plain, ids), logits(part, ids))


def test_a_head_of_its_own_stays_one_where_the_settings_tie_it(root, tmp_path):
    folder = shutil.copytree(save_multimodal(root, "mistral3"), tmp_path / "tied")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")

    part = read_weights(local(folder), dtype="auto").eval()

    ids = torch.arange(40, 60)[None]
    as_it_was = read_weights(local(save_multimodal(root, "mistral3")), dtype="auto").eval()
    assert torch.equal(logits(part, ids), logits(as_it_was, ids))
    assert part.config.tie_word_embeddings is False


def test_planning_measures_the_text_part_alone(root):
    location = local(save_multimodal(root, "qwen3_vl"))

    empty = empty_model(location, precision="fp32", device=torch.device("cpu"))

    assert empty.num_parameters() == read_weights(location, dtype="auto").num_parameters()


def test_the_settings_of_the_whole_model_are_those_of_its_text_part(tmp_path):
    config = build_whole_config("qwen3_vl")
    config.dtype = torch.bfloat16
    config.save_pretrained(tmp_path)

    text = language_config(local(tmp_path))

    assert (text.model_type, text.tie_word_embeddings) == ("qwen3", True)
    assert text.dtype == torch.bfloat16
    assert text.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}


def test_weights_missing_from_a_text_part_are_not_filled_up_with_random_ones(root, tmp_path):
    config = build_whole_config("gemma3")
    config.text_config.num_hidden_layers = 5
    config.text_config.layer_types = ["full_attention"] * 5
    folder = tmp_path / "cut"
    folder.mkdir()
    for file in save_multimodal(root, "gemma3").iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "config.json").unlink()
    config.save_pretrained(folder)

    with pytest.raises(
        ModelError, match=r"the files of 'cut' lack \d+ of its weights, e\.g\. model"
    ):
        read_weights(local(folder), dtype="auto")


def test_a_model_that_is_no_language_model_is_refused_by_its_type(tmp_path):
    ViTConfig().save_pretrained(tmp_path / "eyes")

    with pytest.raises(ModelError, match="no causal language model for 'eyes'") as caught:
        read_weights(local(tmp_path / "eyes"), dtype="auto")

    assert "use a text-only language model" in caught.value.fix


@pytest.mark.parametrize("file", ["chat_template.json", "processor_config.json"])
def test_a_chat_template_is_found_beside_the_processor(root, tmp_path, file):
    template = build_tokenizer("gemma").chat_template
    folder = tmp_path / "model"
    folder.mkdir()
    for path in save_multimodal(root, "gemma3", template="gemma").iterdir():
        if path.name not in ("chat_template.jinja", file):
            (folder / path.name).symlink_to(path)
    (folder / file).write_text(json.dumps({"chat_template": template}), encoding="utf-8")

    assert load_tokenizer(local(folder)).chat_template == template
    assert load_model(None, local(folder)).stop_ids
