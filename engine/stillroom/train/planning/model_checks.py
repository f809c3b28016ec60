"""Measures whether the student knows the token that ends answers in the template it is given."""

from collections.abc import Sequence

import torch

from stillroom.data.chat.render import ChatRenderer
from stillroom.models.batches import TokenSequence
from stillroom.train.config.sections import ModelSection
from stillroom.train.student.model import Student

# About a hundred times the share of a vocabulary of 100,000 tokens.
_UNLIKELY = 1e-3
_VOCABULARY_LAYERS = ("lm_head", "embed", "wte")


def end_token_notes(
    student: Student, section: ModelSection, sequences: Sequence[TokenSequence]
) -> list[str]:
    """Returns a warning if a LoRA adapter has to teach an end token that the base never writes.

    It is measured at the ends of the given answers, before the first step, and only for a template
    that config.yml gives to the model.
    """
    if section.chat_template is None or section.qlora_rank == 0 or _trains_vocabulary(student):
        return []
    tokenizer = student.loaded.tokenizer
    end = ChatRenderer(tokenizer).end_of_turn
    batch = student.collate(sequences)
    with torch.no_grad():
        logprobs_N = student.logprobs(batch)
    is_end_N = batch.targets_N == tokenizer.convert_tokens_to_ids(end)
    if not bool(is_end_N.any()):
        return []
    probability = logprobs_N[is_end_N].mean().exp().item()
    if probability >= _UNLIKELY:
        return []
    note = (
        f"where the first answers end, the student gives {end} a probability of "
        f"{probability:.1g} (mean of {int(is_end_N.sum())}), and this adapter leaves embeddings "
        "and output head as they are: after training, check that answers end by themselves "
        "(stop reasons of evaluate_model); if not, train longer or all weights "
        "(model.qlora_rank: 0), or give a template whose end token the model knows"
    )
    return [note]


def _trains_vocabulary(student: Student) -> bool:
    trained = (name for name, p in student.module.named_parameters() if p.requires_grad)
    return any(part in name for name in trained for part in _VOCABULARY_LAYERS)
