"""A pack gives every sequence the hidden states that it has alone."""

import pytest
import torch

from fakes.tiny_models import ARCHITECTURES, build_model, build_tokenizer
from stillroom.models.batches import TokenSequence
from stillroom.models.lm_head import HeadRunner
from stillroom.models.probe import choose_passes

TOKENIZER = build_tokenizer("chatml")
PACKING = [name for name in ARCHITECTURES if name not in {"gemma2", "qwen3.5"}]


def sequences():
    """Two that stand alone, and three that begin alike, of which two still longer."""
    draw = torch.Generator().manual_seed(0)

    def ids(length):
        return torch.randint(3, 350, (length,), generator=draw).tolist()

    start, prompt = ids(12), ids(21)
    rows = [ids(33), ids(5), [*start, *ids(9)], [*start, *prompt, *ids(14)],
            [*start, *prompt, *ids(3)]]  # fmt: skip
    return [TokenSequence(row, [True] * len(row)) for row in rows]


def model_of(architecture, **changes):
    return build_model(architecture, TOKENIZER, **changes)


@pytest.mark.parametrize("architecture", PACKING)
@torch.no_grad()
def test_what_stands_beside_a_sequence_changes_nothing(architecture):
    head = HeadRunner(model_of(architecture))
    padded = head.batch_hidden(head.collate(sequences()))
    choose_passes(head)

    batch = head.collate(sequences())
    packed = head.batch_hidden(batch)

    assert head.can_pack
    assert len(batch.passes[0].pack.spans) == 7
    assert torch.allclose(packed, padded, atol=1e-5)


@pytest.mark.parametrize("architecture", PACKING)
@torch.no_grad()
def test_other_passes_go_on_as_before(architecture):
    model = model_of(architecture)
    ids = torch.arange(40).view(2, 20) + 5
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[0, :6] = 0
    before = model(input_ids=ids, attention_mask=mask).logits

    choose_passes(HeadRunner(model))

    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, before)


def test_soft_capped_attention_is_left_to_padded_rows():
    model = model_of("gemma2")

    head = HeadRunner(model)
    choose_passes(head)

    assert head.rules.layout == "padded"
    assert head.notes == []


def test_a_model_that_does_not_hand_the_pack_on_is_left_to_padded_rows():
    model = model_of("llama")
    attention = type(model.model.layers[0].self_attn)

    class Deaf(attention):
        def forward(self, *args, **kwargs):
            kwargs.pop("stillroom_pack", None)
            return super().forward(*args, **kwargs)

    for layer in model.model.layers:
        layer.self_attn.__class__ = Deaf

    head = HeadRunner(model)
    choose_passes(head)

    assert head.rules.layout == "padded"
    assert "rows of LlamaForCausalLM are padded" in head.notes[0]
    assert model.config._attn_implementation == "sdpa"


def test_saving_a_model_that_packs_says_nothing_of_it(tmp_path):
    model = model_of("qwen3")
    choose_passes(HeadRunner(model))

    model.save_pretrained(tmp_path)

    assert "stillroom" not in (tmp_path / "config.json").read_text(encoding="utf-8")
