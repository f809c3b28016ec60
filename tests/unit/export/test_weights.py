import json

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fakes.exports import SHAPES, greedy, in_numbers, prompts, trained
from fakes.reporters import KeptReporter
from stillroom.errors import ModelError, RunCancelledError, RunError
from stillroom.export.request import ExportModel, plan_export
from stillroom.export.weights import write_adapter, write_merged
from stillroom.models.resolve import adapter_base, locate_model

NUMBERS = {"bf16": torch.bfloat16, "fp32": torch.float32}


def merge(project, target, precision="auto", **more):
    request = ExportModel(model="run-1", output="out")
    plan = plan_export(project.workspace, request)
    return write_merged(plan, target, precision=precision, reporter=KeptReporter(), **more)


def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


@torch.no_grad()
def gap(model, start, said, meant):
    """Returns by how much the model itself prefers the first token that it says otherwise."""
    first = next((i for i, (a, b) in enumerate(zip(said, meant, strict=False)) if a != b), None)
    if first is None:
        return 0.0
    logprobs = model(torch.tensor([start + meant[:first]])).logits[0, -1].float().log_softmax(-1)
    return (logprobs[meant[first]] - logprobs[said[first]]).item()


@pytest.mark.parametrize(("shape", "numbers"), list(zip(SHAPES, NUMBERS, strict=True)))
def test_a_merged_model_says_what_adapter_and_base_say_to_a_hundred_prompts(
    tmp_path, tiny_models, shape, numbers, record_property
):
    start = in_numbers(tiny_models, shape, NUMBERS[numbers], tmp_path / "base")
    project = trained(tmp_path, start, rank=8, epochs=6)

    written = merge(project, tmp_path / "out")

    merged = loaded(tmp_path / "out")
    assert merged.dtype == NUMBERS[numbers]
    assert written.precision == numbers
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    starts = prompts(tokenizer)
    assert len(starts) == 100
    said = greedy(merged, starts)
    unmerged = PeftModel.from_pretrained(loaded(start), project.checkpoint()).eval()
    meant = greedy(unmerged, starts)
    record_property(f"same answers of 100 in {numbers}", sum(map(list.__eq__, said, meant)))
    if numbers == "fp32":
        assert said == meant
    else:
        # A sum in bf16 is rounded otherwise: what is as good as equally probable may change places.
        gaps = [gap(unmerged, *each) for each in zip(starts, said, meant, strict=True)]
        assert gaps.count(0.0) >= 90
        assert max(gaps) < 0.2
    assert sum(map(list.__eq__, said, greedy(loaded(start), starts))) < 10
    assert tokenizer.decode(said[0]).startswith("It costs ")
    assert written.read_back is not None
    assert written.read_back.kl < (1e-6 if numbers == "fp32" else 1e-2)
    assert written.read_back.same_token > 0.9


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, tiny_models):
    """A project whose run-1 is an adapter on an fp32 base with tied embeddings."""
    root = tmp_path_factory.mktemp("adapter")
    return trained(root, tiny_models.folder("qwen3"), rank=4)


@pytest.mark.parametrize("numbers", list(NUMBERS))
def test_the_number_format_asked_for_is_written_with_one_rounding(tmp_path, adapter, numbers):
    merge(adapter, tmp_path / "exact")
    merge(adapter, tmp_path / "out", precision=numbers)

    exact = load_file(tmp_path / "exact" / "model.safetensors")
    ours = load_file(tmp_path / "out" / "model.safetensors")
    assert all(
        torch.equal(ours[name], tensor.to(NUMBERS[numbers])) for name, tensor in exact.items()
    )


def test_the_folder_holds_what_loading_and_serving_need(tmp_path, adapter):
    merge(adapter, tmp_path / "out", shard_size="40KB")

    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja",
            "tokenizer_config.json", "model.safetensors.index.json"} <= names  # fmt: skip
    assert len([name for name in names if name.endswith(".safetensors")]) > 1
    model, tokenizer = loaded(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id]
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text("utf-8"))
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    config = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert str(tmp_path) not in json.dumps(config)


def test_the_end_of_turn_ends_generation_also_where_the_base_ends_with_another_token(
    tmp_path, tiny_models
):
    start = in_numbers(tiny_models, "own head", torch.float32, tmp_path / "base")
    path = start / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": 0}), encoding="utf-8")
    project = trained(tmp_path, start, rank=4)

    merge(project, tmp_path / "out")

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert loaded(tmp_path / "out").generation_config.eos_token_id == sorted({0, end})


def test_a_merge_that_loses_what_was_learnt_is_refused(tmp_path, tiny_models):
    start = in_numbers(tiny_models, "tied", torch.float32, tmp_path / "base")
    project = trained(tmp_path, start, rank=4)
    checkpoint = project.checkpoint()
    # An adapter on the output of a model that shares it with its embeddings.
    config = json.loads((checkpoint / "adapter_config.json").read_text("utf-8"))
    config["target_modules"] = ["lm_head"]
    (checkpoint / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    torch.manual_seed(0)
    save_file(
        {
            "base_model.model.lm_head.lora_A.weight": torch.randn(4, 32),
            "base_model.model.lm_head.lora_B.weight": torch.randn(352, 4),
        },
        checkpoint / "adapter_model.safetensors",
    )

    with pytest.warns(UserWarning, match="tie"), pytest.raises(RunError) as caught:
        merge(project, tmp_path / "out")

    assert "the reloaded export predicts other tokens than 'run-1'" in caught.value.problem
    assert "format adapter" in caught.value.fix


def test_a_quantised_base_is_refused(tmp_path, tiny_models):
    start = in_numbers(tiny_models, "tied", torch.float32, tmp_path / "base")
    project = trained(tmp_path, start, rank=4)
    config = json.loads((start / "config.json").read_text("utf-8"))
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (start / "config.json").write_text(json.dumps(config), encoding="utf-8")

    with pytest.raises(ModelError, match="is quantised, so no adapter can be merged"):
        merge(project, tmp_path / "out")


def test_cancelling_stops_before_the_next_step(tmp_path, adapter):
    plan = plan_export(adapter.workspace, ExportModel(model="run-1", output="out"))
    with pytest.raises(RunCancelledError):
        write_merged(plan, tmp_path / "out", precision="auto", reporter=KeptReporter(lambda: True))
    assert not (tmp_path / "out").exists()


def test_an_adapter_loads_in_plain_peft_and_says_the_same(tmp_path, adapter):
    location = locate_model(adapter.workspace, "run-1")
    base = adapter_base(adapter.workspace, location)

    written = write_adapter(location, base, tmp_path / "out")

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    starts = prompts(tokenizer)[:20]
    plain = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    merge(adapter, tmp_path / "merged")
    assert greedy(plain, starts) == greedy(loaded(tmp_path / "merged"), starts)
    assert tokenizer.chat_template
    assert written.tool_parser == "hermes"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip


def test_an_adapter_without_weights_is_refused(tmp_path, adapter):
    location = locate_model(adapter.workspace, "run-1")
    bare = tmp_path / "bare"
    bare.mkdir()
    config = location.path / "adapter_config.json"
    (bare / config.name).write_bytes(config.read_bytes())
    with pytest.raises(ModelError, match="has no adapter_model"):
        write_adapter(
            locate_model(adapter.workspace, str(bare)),
            adapter_base(adapter.workspace, location),
            tmp_path / "out",
        )
