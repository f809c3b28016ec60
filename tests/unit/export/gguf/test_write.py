"""A GGUF file that is written here computes what the model does: llama.cpp itself shows it."""

import contextlib
import json

import httpx
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fakes import gguf_models
from fakes.exports import trained
from fakes.llama_cpp import read_gguf, write_checkout
from fakes.reporters import KeptReporter
from stillroom.errors import InputError, ModelError, RunError
from stillroom.export.gguf.families import find_unsupported
from stillroom.export.gguf.vocabulary import read_vocabulary
from stillroom.export.gguf.write import check_convertible, write_gguf
from stillroom.export.programs import running_server
from stillroom.export.request import ExportModel
from stillroom.export.run import export_model
from stillroom.export.verify_plan import XLLAMACPP_SERVER
from stillroom.models.resolve import ModelLocation

gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")


@contextlib.contextmanager
def llama_cpp(file, log):
    """Yields a client of llama.cpp, which has loaded a GGUF file."""
    pytest.importorskip("xllamacpp", reason="the extra gguf is not installed")
    command = [*XLLAMACPP_SERVER, "-m", str(file), "-c", "512", "-np", "1"]
    with running_server(command, log=log, reporter=KeptReporter()) as address:
        url = address.removesuffix("/v1")
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            yield client


def write(folder, precision="fp32"):
    file = folder.with_suffix(f".{precision}.gguf")
    write_gguf(folder, file, name="clerk-1", precision=precision, reporter=KeptReporter())
    return file


def values_of(file):
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


def logprobs(client, ids):
    """Returns llama.cpp's log-probabilities of the most probable next tokens."""
    request = {"prompt": ids, "temperature": 0, "n_predict": 1, "n_probs": 20}
    [answer] = client.post("/completion", json=request).json()["completion_probabilities"]
    return {one["id"]: one["logprob"] for one in answer["top_logprobs"]}


@torch.no_grad()
def logprobs_of(model, ids):
    """Returns the model's own log-probabilities of the five most probable next tokens."""
    best = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1).topk(5)
    return dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))


@pytest.mark.parametrize("name", gguf_models.FAMILIES)
def test_llama_cpp_computes_and_splits_text_as_the_model_of_each_family(name, tmp_path):
    folder = gguf_models.save_model(name, tmp_path / name)
    model, tokenizer = (
        kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    with llama_cpp(write(folder), tmp_path / "log.txt") as client:
        for text in [*gguf_models.TEXTS, "<|im_start|>user\nHi<tool_call><|im_end|>\n"]:
            request = {"content": text, "add_special": True, "parse_special": True}
            ids = client.post("/tokenize", json=request).json()["tokens"]
            assert ids == tokenizer(text).input_ids, text
        ids = tokenizer(" ".join(gguf_models.TEXTS)).input_ids
        # The longer ones reach beyond Gemma's window and what Llama 3's scaling leaves alone.
        for length in (5, 40, 100):
            expected = logprobs_of(model, ids[:length])
            found = logprobs(client, ids[:length])
            # llama.cpp keeps keys and values in fp16.
            assert {i: found[i] for i in expected} == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize(
    ("precision", "file_type", "matrix", "worst"),
    [("fp16", 1, "F16", 1e-3), ("bf16", 32, "BF16", 1e-2), ("q8_0", 7, "Q8_0", 1e-2)],
)
def test_a_file_names_its_model_and_holds_the_weights_in_the_format_that_it_names(
    tmp_path, precision, file_type, matrix, worst
):
    folder = gguf_models.save_model("qwen2", tmp_path / "qwen2")
    file = write(folder, precision)
    values = values_of(file)
    named = [values[f"general.{key}"] for key in ("architecture", "name", "file_type")]
    assert named == ["qwen2", "clerk-1", file_type]
    assert values["tokenizer.chat_template"] == AutoTokenizer.from_pretrained(folder).chat_template
    assert len(values["tokenizer.ggml.tokens"]) == gguf_models.VOCABULARY
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    assert tensors["blk.0.attn_q.bias"].tensor_type.name == "F32"
    up = tensors["blk.1.ffn_up.weight"]
    assert up.tensor_type.name == matrix
    weights = load_file(folder / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    found = torch.from_numpy(gguf.dequantize(up.data, up.tensor_type))
    assert (found - weights).abs().max() < worst * weights.abs().max()


def test_rows_that_fill_no_block_of_q8_0_are_written_in_fp16(tmp_path):
    folder = gguf_models.save_model("qwen3", tmp_path / "qwen3", intermediate_size=40)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(write(folder, "q8_0")).tensors}
    kinds = [tensors[f"blk.0.ffn_{name}.weight"].tensor_type.name for name in ("up", "down")]
    assert kinds == ["Q8_0", "F16"]


def test_a_weight_that_fp16_cannot_hold_is_an_error_and_not_infinite(tmp_path):
    folder = gguf_models.save_model("qwen3", tmp_path / "qwen3")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = 70_000.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunError, match=r"blk\.0\.ffn_up\.weight has a value of 7e\+04"):
        write(folder, "fp16")
    write(folder, "bf16")


@pytest.mark.parametrize(
    ("name", "changes", "obstacle"),
    [
        ("smollm", {"hidden_act": "gelu"}, "the activation 'gelu'"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding windows"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("gemma3", {"query_pre_attn_scalar": 64}, "query_pre_attn_scalar"),
        ("gemma3", {"layer_types": ["full_attention"] * 6}, "layer_types other than every 6th"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(tmp_path, name, changes, obstacle):
    config = gguf_models.FAMILIES[name][1]()
    settings = {**config.to_dict(), **changes}
    assert find_unsupported(config.to_dict()) is None
    assert str(find_unsupported(settings)).startswith(obstacle)
    type(config).from_dict(settings).save_pretrained(tmp_path)
    location = ModelLocation("base", str(tmp_path), is_local=True)
    with pytest.raises(ModelError, match=obstacle) as caught:
        check_convertible(location, location)
    assert "set llama_cpp" in caught.value.fix


def test_a_tokenizer_that_llama_cpp_has_not_is_refused(tmp_path):
    folder = gguf_models.save_model("qwen3", tmp_path / "qwen3")
    file = folder / "tokenizer.json"
    document = json.loads(file.read_text("utf-8"))
    split = {"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Isolated", "invert": False}
    for changes, reason in [
        ({"pre_tokenizer": split}, "splits text into words by its own rules"),
        ({"normalizer": {"type": "Lowercase"}}, "normalises text with Lowercase"),
        ({"model": {**document["model"], "ignore_merges": True}}, "by its own rules"),
        ({"model": {**document["model"], "byte_fallback": True}}, "unlike Gemma's"),
        ({"model": {"type": "WordPiece"}}, "is of type WordPiece"),
    ]:
        with pytest.raises(ModelError, match=reason):
            read_vocabulary({**document, **changes}, gguf_models.VOCABULARY)


def export(workspace, output, **fields):
    folder = workspace.runs / "export-1"
    folder.mkdir(exist_ok=True)
    request = ExportModel(model="run-1", output=output, format="gguf", **fields)
    return export_model(workspace, request, folder=folder, reporter=KeptReporter())


def test_an_export_needs_no_checkout_of_llama_cpp(tiny_models, tmp_path, monkeypatch):
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    workspace = trained(tmp_path, tiny_models.folder("llama"), rank=4).workspace
    for output, precision, named, file_type in [
        ("clerk-1", None, "fp16", 1),
        ("clerk-2", "q8_0", "q8_0", 7),
    ]:
        result = export(workspace, output, precision=precision)
        out = workspace.root / output
        assert {path.name for path in out.iterdir()} == {
            f"{output}.gguf", "README.md", "export.json", "stillroom.manifest.json",
        }  # fmt: skip
        assert (result.precision, result.format) == (named, "gguf")
        values = values_of(out / f"{output}.gguf")
        assert [values["general.name"], values["general.file_type"]] == [output, file_type]
        assert f"| number format | {named} |" in (out / "README.md").read_text("utf-8")
    with pytest.raises(ValidationError, match="'bf16', 'fp32', 'fp16' or 'q8_0'"):
        export(workspace, "clerk-3", precision="q4_k_m")


def test_other_families_need_the_converter_and_the_error_says_so(
    tiny_models, tmp_path, monkeypatch
):
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    workspace = trained(tmp_path, tiny_models.folder("granite"), rank=4).workspace
    with pytest.raises(InputError) as caught:
        export(workspace, "out")
    assert "is of type 'granite'" in caught.value.problem
    assert "Qwen2, Qwen3 and Gemma 3" in caught.value.problem
    assert "set llama_cpp to its folder" in caught.value.fix
    checkout = write_checkout(tmp_path / "llama.cpp")
    assert export(workspace, "out", llama_cpp=str(checkout), precision="q8_0").precision == "q8_0"
    assert read_gguf(workspace.root / "out" / "out.gguf")[0] == "q8_0"
