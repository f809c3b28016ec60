import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from fakes.tiny_models import ARCHITECTURES, build_model, build_tokenizer
from stillroom.errors import ModelError
from stillroom.models.batches import TokenSequence, collate
from stillroom.models.lm_head import HeadRunner, compute_in_tiles, token_logprobs

IDS = torch.randint(0, 352, (2, 20), generator=torch.Generator().manual_seed(0))
TOKENIZER = build_tokenizer("chatml")


def chosen_positions(ids):
    marks = [position % 3 == 2 for position in range(ids.shape[1])]
    sequences = [TokenSequence(row.tolist(), marks) for row in ids]
    return collate(sequences, device=torch.device("cpu"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_the_logits_are_the_models_own(architecture):
    model = build_model(architecture, TOKENIZER)
    head = HeadRunner(model)
    batch = chosen_positions(IDS)

    head.check()

    own = model(input_ids=IDS).logits
    assert batch.num_trained == 12
    assert torch.allclose(
        head.batch_logits(batch), own.flatten(0, 1)[batch.passes[0].sources_N], atol=1e-5
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_the_models_short_number_format_is_not_taken_for_another_head(architecture):
    model = build_model(architecture, TOKENIZER).to(torch.bfloat16)
    # Large logits, so that soft-capping works on them and rounding is at its worst.
    model.get_output_embeddings().weight.mul_(8)

    HeadRunner(model).check()


@torch.no_grad()
def test_the_head_runs_the_adapter_of_a_peft_model():
    base = build_model("llama", TOKENIZER)
    plain = HeadRunner(base).hidden(IDS)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(base, config)
    head = HeadRunner(model)

    head.check()

    ours = head.logits(head.hidden(IDS).flatten(0, 1))
    assert torch.allclose(ours, model(input_ids=IDS).logits.flatten(0, 1), atol=1e-5)
    assert not torch.allclose(head.hidden(IDS), plain, atol=1e-2)


class OddHead(LlamaForCausalLM):
    """A family whose logits are formed in a way of its own."""

    factor = 1.01

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * self.factor
        return output


@pytest.mark.parametrize("size", [1.0, 1e-4], ids=["large logits", "small logits"])
def test_an_unknown_head_is_refused(size):
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, initializer_range=size, eos_token_id=1, bos_token_id=0,
    )  # fmt: skip
    model = OddHead(config)

    with pytest.raises(ModelError, match="OddHead is not supported"):
        HeadRunner(model).check()


@pytest.mark.parametrize("most", [1, 5, 100])
def test_tiles_give_the_values_and_gradients_of_the_whole(most):
    weights = torch.randn(4, 9, generator=torch.Generator().manual_seed(1)).requires_grad_()
    hidden = torch.randn(12, 4, generator=torch.Generator().manual_seed(2)).requires_grad_()
    targets = torch.arange(12) % 9
    largest: list[int] = []

    def logprobs(hidden_NH, part):
        largest.append(len(hidden_NH))
        return token_logprobs(hidden_NH @ weights, targets[part])

    found = compute_in_tiles(logprobs, hidden, tile_size=most)
    ours = torch.autograd.grad((found * targets).sum(), (weights, hidden))

    assert max(largest) == min(most, 12)
    whole = logprobs(hidden, slice(0, 12))
    reference = torch.autograd.grad((whole * targets).sum(), (weights, hidden))
    assert torch.allclose(found, whole, atol=1e-6)
    for gradient, exact in zip(ours, reference, strict=True):
        assert torch.allclose(gradient, exact, atol=1e-5)
