import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from stillroom.export.folder import TensorFileError, read_header, stored_bytes
from stillroom.export.weights import model_settings

TENSORS = {"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16),
           "n": torch.zeros(2, dtype=torch.int64)}  # fmt: skip


def test_the_size_is_that_of_the_tensors_in_the_format_asked_for(tmp_path):
    save_file(TENSORS, tmp_path / "model-1.safetensors", metadata={"format": "pt"})
    save_file({"c": torch.zeros(4)}, tmp_path / "model-2.safetensors")
    assert stored_bytes(tmp_path, "auto") == 15 * 4 + 7 * 2 + 2 * 8 + 4 * 4
    assert stored_bytes(tmp_path, "bf16") == (15 + 7 + 4) * 2 + 2 * 8
    assert stored_bytes(tmp_path, "fp32") == (15 + 7 + 4) * 4 + 2 * 8


def test_a_file_cut_anywhere_is_seen(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    whole = path.read_bytes()
    assert set(read_header(path)) == {"a", "b", "n"}
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(TensorFileError):
            read_header(path)
    path.write_bytes(whole.replace(b"dtype", b"\xff\xffype"))
    with pytest.raises(TensorFileError, match="is damaged"):
        read_header(path)


def test_a_folder_without_weights_is_an_error(tmp_path):
    with pytest.raises(TensorFileError, match=r"has no \.safetensors file"):
        stored_bytes(tmp_path, "auto")


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
         "original_max_position_embeddings": 64},
    ],
)  # fmt: skip
def test_old_names_say_the_same_to_old_and_new_readers(rope):
    config = LlamaConfig(rope_parameters=rope, max_position_embeddings=512, dtype="bfloat16")
    settings = model_settings(config.to_dict())
    again = LlamaConfig.from_dict(settings)
    assert again.rope_parameters == config.rope_parameters
    assert again.dtype == config.dtype
    assert settings["rope_theta"] == rope["rope_theta"]
    assert settings["torch_dtype"] == "bfloat16"
    assert settings.get("rope_scaling", {}).get("factor") == rope.get("factor")


def test_settings_without_positions_or_with_several_kinds_stay_as_they_are():
    kinds = {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}}
    assert model_settings(kinds) == kinds
    assert model_settings({"vocab_size": 3}) == {"vocab_size": 3}


@pytest.mark.parametrize("change", [-3, 2])
def test_the_error_is_true_of_shorter_and_of_longer_files(tmp_path, change):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    size = path.stat().st_size
    path.write_bytes((path.read_bytes() + b"..")[: size + change])
    with pytest.raises(TensorFileError, match=f"has {size + change} bytes, but .* {size}$"):
        read_header(path)
