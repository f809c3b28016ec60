"""A GGUF file becomes a folder that says what the file says: the same logits, tokens and stops."""

import shutil
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Regex, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen2Config
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from fakes.gguf_files import write_gguf
from fakes.mask_families import MASK_FAMILIES, mask_tokenizer
from fakes.tiny_models import TinyModels, build_tokenizer
from stillroom.errors import MissingExtraError, ModelError
from stillroom.files import FileLock, file_sha256
from stillroom.models.gguf.folder import cache_folder, convert_gguf, pretrained_path
from stillroom.models.load import LoadedModel, load_model, load_tokenizer, read_weights
from stillroom.models.resolve import ModelLocation, identify, locate_model
from stillroom.settings import Workspace

TEXTS = [
    "The lamp costs 12.\nThe chair  costs 1305, doesn't it?",
    '{"name": "price", "arguments": {"item": "lamp"}}',
    "<|im_start|>user\nWhat does the lamp cost?<|im_end|>\n",
]
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
CONFIGS = {
    "llama": lambda size: LlamaConfig(vocab_size=size, **_SIZES, tie_word_embeddings=True),
    "llama-own-head": lambda size: LlamaConfig(vocab_size=size, **_SIZES),
    "qwen2": lambda size: Qwen2Config(vocab_size=size, **_SIZES),
    "gemma3": lambda size: Gemma3TextConfig(
        vocab_size=size, **{**_SIZES, "num_hidden_layers": 6}, head_dim=16,
        query_pre_attn_scalar=16, sliding_window=4,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


WORDS = {"qwen2": {"tokenizer.ggml.pre": "qwen2"}}


def tiny(name: str = "llama") -> LoadedModel:
    is_gemma = name == "gemma3"
    tokenizer = mask_tokenizer(MASK_FAMILIES["gemma"]) if is_gemma else build_tokenizer()
    if name in WORDS:
        core = tokenizer.backend_tokenizer
        core.normalizer = normalizers.NFC()
        core.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])  # fmt: skip
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](len(tokenizer)), dtype=torch.float32)
    for parameter in model.parameters():
        # Norms and biases too, which are ones and zeros at first.
        torch.nn.init.normal_(parameter, std=0.3)
    return LoadedModel(ModelLocation("tiny", "tiny", True), model.eval(), tokenizer, frozenset())


def logits(model, ids) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_folder_has_the_logits_and_tokens_of_the_model_in_the_file(tmp_path, name):
    before = tiny(name)
    path = write_gguf(tmp_path / "tiny.gguf", before, changes=WORDS.get(name))

    after = load_model(Workspace(tmp_path), locate_model(Workspace(tmp_path), "tiny.gguf"))

    for text in TEXTS:
        ids = before.tokenizer.encode(text, add_special_tokens=False)
        assert after.tokenizer.encode(text, add_special_tokens=False) == ids
    ids = [number % before.num_embeddings for number in range(7, 7 + 40 * 3, 3)]
    assert torch.allclose(logits(after.model, ids), logits(before.model, ids), atol=1e-4)
    assert after.model.dtype == torch.float32
    assert after.tokenizer.chat_template == before.tokenizer.chat_template
    assert path.is_file()


def test_a_tokenizer_that_transformers_would_load_otherwise_is_refused(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", tiny("qwen2"))

    with pytest.raises(ModelError, match=r"'gpt-2', which transformers does not use for qwen2"):
        convert_gguf(path)


def test_qwen3_takes_the_size_of_its_heads_from_the_file(tmp_path, tiny_models: TinyModels):
    before = replace(tiny_models.load("qwen3"), tokenizer=tiny("qwen2").tokenizer)
    write_gguf(tmp_path / "tiny.gguf", before, changes=WORDS["qwen2"])

    after = load_model(Workspace(tmp_path), locate_model(Workspace(tmp_path), "tiny.gguf"))

    ids = list(range(7, 47))
    assert torch.allclose(logits(after.model, ids), logits(before.model, ids), atol=1e-4)
    assert after.stop_ids == before.stop_ids


def test_weights_in_blocks_are_what_llama_cpp_reads_from_them(tmp_path):
    before = tiny()
    kind = gguf.GGMLQuantizationType.Q8_0
    write_gguf(tmp_path / "tiny.gguf", before, quantized=kind)
    weight = before.model.model.embed_tokens.weight.detach().numpy()
    expected = gguf.dequantize(gguf.quantize(weight, kind), kind)

    found = read_weights(locate_model(Workspace(tmp_path), "tiny.gguf"), dtype="auto")

    assert found.dtype == torch.bfloat16
    ours = found.get_input_embeddings().weight.detach().float().numpy()
    assert np.allclose(ours, expected, rtol=2**-8)
    assert not np.allclose(ours, weight, rtol=2**-8)


def test_tied_weights_are_tied_and_stored_once(tmp_path):
    write_gguf(tmp_path / "tied.gguf", tiny("llama"))
    write_gguf(tmp_path / "own.gguf", tiny("llama-own-head"))

    tied, own = (
        read_weights(locate_model(Workspace(tmp_path), name), dtype="auto")
        for name in ("tied.gguf", "own.gguf")
    )

    assert tied.get_input_embeddings().weight is tied.get_output_embeddings().weight
    assert own.get_input_embeddings().weight is not own.get_output_embeddings().weight
    sizes = [(convert_gguf(tmp_path / f) / "model.safetensors").stat().st_size
             for f in ("tied.gguf", "own.gguf")]  # fmt: skip
    assert sizes[1] - sizes[0] >= tied.get_input_embeddings().weight.nbytes


def test_the_ends_of_texts_and_of_turns_both_stop_the_model(tmp_path):
    before = tiny()
    before.tokenizer.eos_token = "<|endoftext|>"
    before.tokenizer.chat_template = None
    path = write_gguf(tmp_path / "tiny.gguf", before, turn_end="<|im_end|>")

    model = AutoModelForCausalLM.from_pretrained(convert_gguf(path))

    names = before.tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id)
    assert names == ["<|endoftext|>", "<|im_end|>"]
    with pytest.raises(ModelError, match="no chat template") as caught:
        load_tokenizer(locate_model(Workspace(tmp_path), "tiny.gguf"))
    assert "model.chat_template" in caught.value.fix


def test_the_beginning_of_a_text_is_added_where_the_file_says_so(tmp_path):
    before = tiny()
    write_gguf(tmp_path / "plain.gguf", before)
    changes = {"tokenizer.ggml.add_bos_token": True}
    write_gguf(tmp_path / "begun.gguf", before, changes=changes)

    plain, begun = (
        load_tokenizer(locate_model(Workspace(tmp_path), name))
        for name in ("plain.gguf", "begun.gguf")
    )

    ids = plain.encode("The lamp")
    assert begun.encode("The lamp") == [before.tokenizer.bos_token_id, *ids]
    assert begun.encode("The lamp", add_special_tokens=False) == ids


def test_digits_are_cut_as_the_file_says(tmp_path):
    before = tiny()
    write_gguf(tmp_path / "plain.gguf", before)
    write_gguf(tmp_path / "digits.gguf", before, changes={"tokenizer.ggml.pre": "smollm"})

    plain, digits = (
        load_tokenizer(locate_model(Workspace(tmp_path), name)).backend_tokenizer.pre_tokenizer
        for name in ("plain.gguf", "digits.gguf")
    )

    assert [word for word, _ in plain.pre_tokenize_str("It is 120")] == ["It", "Ġis", "Ġ120"]
    cut = [word for word, _ in digits.pre_tokenize_str("It is 120")]
    assert cut == ["It", "Ġis", "Ġ", "1", "2", "0"]


def test_llama_3s_positions_are_found_from_their_factors(tmp_path):
    scaling = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0,
               "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
    before = tiny()
    config = LlamaConfig(vocab_size=before.num_embeddings, **_SIZES, rope_parameters=scaling)
    scaled = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    inverse = 1 / 500000.0 ** (torch.arange(0, 8, 2) / 8)
    factors = (inverse / scaled.model.rotary_emb.inv_freq).numpy()
    path = tmp_path / "tiny.gguf"
    write_gguf(path, replace(before, model=scaled), extra_tensors={"rope_freqs.weight": factors})

    after = read_weights(locate_model(Workspace(tmp_path), "tiny.gguf"), dtype="auto")

    assert after.config.rope_parameters["factor"] == 32.0
    assert torch.allclose(logits(after, range(40)), logits(scaled, range(40)), atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba'"),
        ({"tokenizer.ggml.pre": "poro-chat"}, "pre-tokenizer 'poro-chat'"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer 'bert'"),
        ({"llama.expert_count": 8}, "8 experts"),
        ({"llama.rope.scaling.type": "yarn"}, "RoPE scaling 'yarn'"),
        ({"split.count": 3}, "one of 3 parts"),
    ],
)
def test_what_is_not_converted_is_refused_by_name(tmp_path, changes, problem):
    path = tmp_path / "tiny.gguf"
    architecture = changes.pop("general.architecture", None)
    write_gguf(path, tiny(), changes=changes)
    if architecture is not None:
        path.write_bytes(path.read_bytes().replace(b"llama", architecture.encode(), 1))

    with pytest.raises(ModelError, match=problem):
        locate_model(Workspace(tmp_path), "tiny.gguf")


def test_a_type_of_numbers_that_is_not_converted_is_named(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny(), quantized=gguf.GGMLQuantizationType.MXFP4)

    with pytest.raises(ModelError, match=r"stores the tensor \S+ in the type MXFP4"):
        locate_model(Workspace(tmp_path), "tiny.gguf")


def test_weights_that_the_model_would_leave_out_are_refused(tmp_path):
    path = tmp_path / "tiny.gguf"
    bias = {"blk.0.attn_norm_2.weight": np.ones(32, np.float32)}
    write_gguf(path, tiny(), extra_tensors=bias)

    with pytest.raises(ModelError, match=r"does not have, e\.g\. blk\.0\.attn_norm_2"):
        convert_gguf(path)
    assert not list(cache_folder().glob("*-*[0-9]"))


def test_a_disk_without_room_for_the_converted_model_is_said_before_it_is_written(
    tmp_path, monkeypatch
):
    path = write_gguf(tmp_path / "tiny.gguf", tiny())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))

    with pytest.raises(ModelError, match=r"needs about 0\.1 GB, and 0\.0 GB") as caught:
        convert_gguf(path)
    assert "free disk space there" in caught.value.fix


def test_missing_weights_are_refused(tmp_path):
    before = tiny()
    before.model.config.num_hidden_layers = 3
    path = write_gguf(tmp_path / "tiny.gguf", before)

    with pytest.raises(ModelError, match=r"lacks \d+ of its model's weights"):
        convert_gguf(path)


@pytest.mark.parametrize("kept", [10, 200, 0.5, 0.99])
def test_a_file_that_was_cut_is_refused(tmp_path, kept):
    path = write_gguf(tmp_path / "tiny.gguf", tiny())
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data)) if kept < 1 else kept])

    with pytest.raises(ModelError, match=r"incomplete|cannot be read as a GGUF file"):
        locate_model(Workspace(tmp_path), "tiny.gguf")


@pytest.mark.parametrize(
    "header",
    [
        struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 1),
        struct.pack("<4sIQQ", b"GGUF", 3, 1, 1 << 60),
        struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 1 << 62),
        struct.pack("<4sIQQQ4sIIQ", b"GGUF", 3, 0, 1, 4, b"abcd", 9, 8, 1 << 50),
        struct.pack("<4sIQQQ4sIIQ", b"GGUF", 3, 0, 1, 4, b"abcd", 9, 12, 1 << 50),
        struct.pack("<4sIQQQ4sIIQ", b"GGUF", 3, 0, 1, 4, b"abcd", 9, 9, 2),
        struct.pack("<4sIQQQ4sI", b"GGUF", 3, 0, 1, 4, b"abcd", 77),
        struct.pack(">4sIQQ", b"GGUF", 3, 1, 1),
    ],
)
def test_a_header_that_claims_too_much_is_refused_at_once(tmp_path, header):
    (tmp_path / "bad.gguf").write_bytes(header + bytes(64))

    with pytest.raises(ModelError, match="cannot be read as a GGUF file"):
        locate_model(Workspace(tmp_path), "bad.gguf")


def test_a_file_is_converted_once_and_again_when_it_changes(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", tiny())
    first = convert_gguf(path)
    stamp = (first / "config.json").stat().st_mtime_ns

    again = convert_gguf(path)
    write_gguf(path, tiny("llama-own-head"))
    other = convert_gguf(path)

    assert again == first
    assert (first / "config.json").stat().st_mtime_ns == stamp
    assert other != first
    assert {f.parent for f in cache_folder().glob("*/config.json")} == {first, other}


def test_two_that_need_it_at_once_share_one_folder(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", tiny())

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(convert_gguf, [path, path])

    assert first == second
    assert [f.name for f in cache_folder().iterdir() if f.is_dir()] == [first.name]


def test_what_a_killed_conversion_left_is_replaced(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", tiny())
    name = f"{file_sha256(path)[:32]}-1"
    left = cache_folder() / f".{name}.partial"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")

    folder = convert_gguf(path)

    assert folder.name == name
    assert not left.exists()
    lock = FileLock(folder.with_suffix(".lock"))
    assert lock.try_acquire()
    lock.release()


def test_converting_draws_no_random_numbers(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", tiny())
    torch.manual_seed(5)
    before = torch.get_rng_state()

    convert_gguf(path)

    assert torch.equal(torch.get_rng_state(), before)


def test_without_the_package_the_error_says_what_to_install(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf", tiny())
    monkeypatch.setitem(sys.modules, "gguf", None)

    with pytest.raises(MissingExtraError) as caught:
        convert_gguf(path)
    assert "stillroom[gguf]" in caught.value.fix


def test_the_record_of_a_model_names_the_file_and_its_hash(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", tiny())
    location = locate_model(Workspace(tmp_path), "tiny.gguf")

    record = identify(Workspace(tmp_path), location, role="student")

    assert (record.name, record.location) == ("tiny.gguf", str(path))
    assert record.sha256 == file_sha256(path)
    assert location.inputs == [path]
    assert not location.is_adapter
    assert location.record is None
    assert pretrained_path(location).startswith(str(tmp_path / "cache"))


def test_a_folder_that_holds_only_gguf_files_is_refused_with_their_names(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tiny.gguf").write_bytes(b"GGUF")

    with pytest.raises(ModelError) as caught:
        locate_model(Workspace(tmp_path), "model")
    assert "model/tiny.gguf" in caught.value.fix
