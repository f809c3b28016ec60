import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fakes.decoding import full_logprobs, random_prompts
from fakes.tiny_models import build_tokenizer
from stillroom.errors import ModelError
from stillroom.models.batches import TokenSequence, collate
from stillroom.models.load import LoadedModel
from stillroom.models.resolve import ModelLocation
from stillroom.teachers.local_hf import LocalTeacher


def sequences():
    prompts = random_prompts((9, 30, 5, 17))
    return [TokenSequence(ids, [i % 2 == 1 for i in range(len(ids))]) for ids in prompts]


@pytest.mark.parametrize("max_batch_tokens", [1, 40, 10_000])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "mistral-sliding"])
def test_scores_are_those_of_a_full_pass_however_they_are_batched(
    tiny_models, architecture, max_batch_tokens
):
    loaded = tiny_models.load(architecture, "chatml")
    teacher = LocalTeacher(loaded, max_batch_tokens=max_batch_tokens)

    scores = teacher.score_tokens(sequences())

    for sequence, score in zip(sequences(), scores, strict=True):
        wanted = full_logprobs(loaded, sequence.ids)[1::2]
        assert score.tolist() == pytest.approx(wanted, abs=1e-5)


def test_logits_come_without_a_gradient_and_in_the_order_of_the_batch(tiny_models):
    loaded = tiny_models.load("llama", "chatml")
    batch = collate(sequences(), device=torch.device("cpu"))

    logits = LocalTeacher(loaded).logits(batch)

    assert not logits.requires_grad
    with torch.no_grad():
        [one] = batch.passes
        own = loaded.model(one.ids_BT).logits.flatten(0, 1)[one.sources_N]
    assert torch.allclose(logits, own, atol=1e-5)


def test_a_teacher_with_an_unknown_head_is_refused():
    class HalvedHead(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits / 2
            return output

    config = LlamaConfig(
        vocab_size=352, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, eos_token_id=1, bos_token_id=0,
    )  # fmt: skip
    location = ModelLocation("odd", "odd", is_local=True)
    loaded = LoadedModel(location, HalvedHead(config), build_tokenizer(), frozenset())

    with pytest.raises(ModelError, match="HalvedHead is not supported"):
        LocalTeacher(loaded)
