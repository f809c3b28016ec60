"""A short check that sampling step by step gives a model's own probabilities."""

import random
from collections.abc import Sequence

import torch

from stillroom.errors import ModelError
from stillroom.models.heads import OutputHead, token_logprobs
from stillroom.models.load import LoadedModel
from stillroom.policy.decode import DecodeEngine
from stillroom.policy.sequences import DecodedSequence
from stillroom.types import SamplingSettings

_PROMPT_LENGTHS = (3, 7)
_NUM_TOKENS = 4
_MAX_STEPS = 16
# The largest difference of log-probabilities (nats); rounding in half precision adds up over the
# layers.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_HALF_TOLERANCE = 0.25
_ELSEWHERE = "serve the model with vLLM or SGLang and give its URL with provider openai"


@torch.no_grad()
def check_decoding(loaded: LoadedModel) -> None:
    """Raises ModelError unless sampling over the cache agrees with the model's forward pass."""
    name = type(loaded.model).__name__
    try:
        sequences = _decode_a_little(loaded)
        gap = max(_largest_gap(loaded, sequence) for sequence in sequences)
    # An architecture that cannot be run this way may raise any of these.
    except (ValueError, TypeError, AttributeError, IndexError, KeyError, RuntimeError) as error:
        raise ModelError(
            f"{name} cannot be sampled in-process: {type(error).__name__}: {error}", _ELSEWHERE
        ) from error
    if not gap <= _TOLERANCE.get(loaded.model.dtype, _HALF_TOLERANCE):
        raise ModelError(
            f"{name} gives other probabilities when sampled step by step (they differ by {gap:.3g} "
            "nats), so its rollouts cannot be trusted",
            _ELSEWHERE,
        )


def _decode_a_little(loaded: LoadedModel) -> Sequence[DecodedSequence]:
    """Returns one sampled sequence for each prompt length, all sampled in one batch."""
    engine = DecodeEngine(loaded, max_rows=len(_PROMPT_LENGTHS), max_context=loaded.max_context)
    settings = SamplingSettings(temperature=0, max_tokens=_NUM_TOKENS)
    vocabulary = int(loaded.model.config.get_text_config().vocab_size)
    sequences = [DecodedSequence(settings, draws=random.Random(0)) for _ in _PROMPT_LENGTHS]
    for sequence, length in zip(sequences, _PROMPT_LENGTHS, strict=True):
        sequence.give([(7 * i + length) % vocabulary for i in range(length)])
        engine.ask(sequence)
    for _ in range(_MAX_STEPS):
        engine.step()
    return sequences


def _largest_gap(loaded: LoadedModel, sequence: DecodedSequence) -> float:
    """Returns the largest difference (nats) of log-probabilities from those of a forward pass."""
    head = OutputHead(loaded.model)
    ids_1T = torch.tensor([sequence.ids], device=loaded.device)
    logits_NV = head.logits(head.hidden(ids_1T)[0, :-1])
    expected = token_logprobs(logits_NV, ids_1T[0, 1:]).tolist()
    tokens = zip(sequence.sampled[1:], sequence.logprobs[1:], expected, strict=True)
    return max(abs(decoded - exact) for is_sampled, decoded, exact in tokens if is_sampled)
