"""Finds the fastest exact sampling mode for a model.

A mode is exact if its sampled tokens have the log-probabilities of one forward pass over the whole
conversation. A small copy of the model is sampled past every boundary that the configuration names
(window, chunk, original context), and the model itself for a few tokens.
"""

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from stillroom.errors import ModelError
from stillroom.models.lm_head import HeadRunner, token_logprobs
from stillroom.models.load import LoadedModel
from stillroom.models.resolve import ModelLocation
from stillroom.models.small_copy import LONGEST_BOUNDARY, build_copy, small_configs
from stillroom.policy.decode import DecodeEngine
from stillroom.policy.passes import (
    SLOWER_MODES,
    SamplingMode,
    SlotPasses,
    passes_for,
    set_sampling_mode,
)
from stillroom.policy.sequences import DecodedSequence
from stillroom.types import SamplingSettings

_MAX_STEPS = 200
# The largest difference of log-probabilities (nats); rounding in half precision adds up over the
# layers.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_HALF_TOLERANCE = 0.25
# The errors that a model may raise if it does not support a sampling mode.
_UNSUPPORTED_ERRORS = (ValueError, TypeError, AttributeError, IndexError, KeyError, RuntimeError)
_SERVE_FIX = "serve the model with vLLM or SGLang and give its URL with provider openai"
_FALLBACKS: dict[SamplingMode, str] = {
    "batched, given tokens singly": "is sampled with its prompt tokens run one by one",
    "row by row": "is sampled row by row over transformers' own cache, which is far slower",
    "without a cache": "is sampled without a cache, with a forward pass over the whole "
    "conversation for each token, which is very slow",
}
_WITHOUT_GRAPHS = "is sampled without CUDA graphs, launching the kernels of each step one by one"


@dataclass(frozen=True, slots=True)
class _Trial:
    """Conversations that are sampled in one batch, to see whether batching changes them."""

    prompts: tuple[int, ...]
    """The number of tokens of each prompt. The last two prompts are equal, and begin with the
    third."""
    replies: tuple[int, ...]
    """The number of tokens that each conversation is given after its first turn; 0: it ends."""
    max_rows: int
    """The number of conversations that are sampled at once."""
    num_new: int
    """The number of tokens that are sampled in each turn."""


_SHORT = _Trial(prompts=(3, 7), replies=(2, 0), max_rows=2, num_new=3)
# There are fewer slots than conversations: as some end, others take their slots, and slots move.
# Turns end together, but one conversation gets its reply late, while the others continue.
_LONG = _Trial(
    prompts=(LONGEST_BOUNDARY - 2, 5, 22, 1, LONGEST_BOUNDARY + 9, 30, 30),
    replies=(11, 21, 2, 0, 0, 7, 1),
    max_rows=5,
    num_new=4,
)


@torch.no_grad()
def check_decoding(loaded: LoadedModel) -> list[str]:
    """Sets the fastest sampling mode that leaves the model's log-probabilities unchanged.

    Returns notes for the user if that is not the usual mode. Raises ModelError if no mode does.
    """
    model, name = loaded.model, type(loaded.model).__name__
    set_sampling_mode(model, "batched")
    tolerance = _TOLERANCE.get(model.dtype, _HALF_TOLERANCE)
    text: Any = model.config.get_text_config()
    copy_args = (type(text), *small_configs(model))
    reason, result = "", _TrialResult(0.0)
    modes: list[SamplingMode] = [*SLOWER_MODES]
    if isinstance(passes_for(model, num_slots=1), SlotPasses):
        modes.insert(0, "batched")
    else:
        modes.remove("batched, given tokens singly")
        reason = "one of its layers has a cache of an unsupported kind"
    for mode in modes:
        set_sampling_mode(model, mode)
        result = _copy_gap(mode, *copy_args)
        if result.gap <= _TOLERANCE[torch.float32]:
            result = _run_trial(loaded, _SHORT)
        if result.gap <= tolerance:
            notes = [f"{name} {_FALLBACKS[mode]}: {reason}"] if mode in _FALLBACKS else []
            if result.graph_error is not None:
                notes.append(f"{name} {_WITHOUT_GRAPHS}: {result.graph_error}")
            return notes
        reason = reason or result.explain()
    set_sampling_mode(model, "batched")
    raise ModelError(f"{name} cannot be sampled in-process: {result.explain()}", _SERVE_FIX)


@dataclass(frozen=True, slots=True)
class _TrialResult:
    """The largest error of the sampled log-probabilities (nats), or the error that was raised."""

    gap: float
    error: str = ""
    graph_error: str | None = None
    """Why a decode step could not be recorded as a CUDA graph; None if it was, or on a CPU."""

    def explain(self) -> str:
        """Explains why the model cannot be sampled in the trial's mode."""
        return self.error or (
            f"otherwise some of its log-probabilities would be off by {self.gap:.3g} nats"
        )


@functools.lru_cache(maxsize=64)
def _copy_gap(
    mode: SamplingMode, config_class: type[PreTrainedConfig], *configs: str
) -> _TrialResult:
    """Runs the long trial on a small copy of the model; the gap is 0 if no copy can be run."""
    for config in configs:
        try:
            model = build_copy(config_class, config)
            if model is None:
                continue
            HeadRunner(model).check()
        except (*_UNSUPPORTED_ERRORS, ModelError):
            continue
        set_sampling_mode(model, mode)
        tokenizer = _CopyTokenizer(int(model.config.get_text_config().vocab_size))
        location = ModelLocation("copy", "copy", is_local=True)
        return _run_trial(LoadedModel(location, model, tokenizer, frozenset()), _LONG)
    return _TrialResult(0.0)


@dataclass(frozen=True, slots=True)
class _CopyTokenizer:
    """A stand-in for a copy's tokenizer, with the model's vocabulary size."""

    num_tokens: int

    def get_vocab(self) -> dict[str, int]:
        """Returns the last token's id only, which is all that the engine reads."""
        return {"last": self.num_tokens - 1}


def _run_trial(loaded: LoadedModel, trial: _Trial) -> _TrialResult:
    """Samples with the engine, and compares its log-probabilities with plain forward passes.

    An error counts as an infinite gap.
    """
    try:
        head = HeadRunner(loaded.model)
        engine = DecodeEngine(loaded, max_rows=trial.max_rows, max_context=loaded.max_context)
        sequences = _sample_trial(engine, loaded, trial)
        gaps = [_largest_gap(loaded, head, sequence) for sequence in sequences]
    except _UNSUPPORTED_ERRORS as error:
        return _TrialResult(math.inf, f"{type(error).__name__}: {error}")
    gap = max(gaps)
    return _TrialResult(math.inf if math.isnan(gap) else gap, graph_error=engine.graph_error)


def _sample_trial(
    engine: DecodeEngine, loaded: LoadedModel, trial: _Trial
) -> Sequence[DecodedSequence]:
    """Samples the conversations of a trial in one batch, and returns them."""
    vocabulary = int(loaded.model.config.get_text_config().vocab_size)
    settings = SamplingSettings(temperature=1.0, max_tokens=trial.num_new)
    replies: dict[DecodedSequence, list[int]] = {}
    prompts = [_ids(length, seed, vocabulary) for seed, length in enumerate(trial.prompts)]
    if len(prompts) > 2:
        prompts[-1] = prompts[-2] = prompts[2] + prompts[-2]
    for seed, (prompt, length) in enumerate(zip(prompts, trial.replies, strict=True)):
        sequence = DecodedSequence(settings, rng=random.Random(seed))
        sequence.append_given(prompt)
        replies[sequence] = _ids(length, seed + 50, vocabulary)
        engine.request_turn(sequence)
    late: list[DecodedSequence] = []
    for _ in range(_MAX_STEPS):
        if not engine.has_work and not late:
            break
        waiting, late = late, []
        for sequence in [*waiting, *engine.step()]:
            reply = replies[sequence]
            if not reply:
                engine.release(sequence)
            elif sequence not in waiting and len(reply) > 2 * trial.num_new:
                late.append(sequence)
            else:
                replies[sequence] = []
                sequence.append_given(reply)
                engine.request_turn(sequence)
    return list(replies)


def _ids(length: int, seed: int, vocabulary: int) -> list[int]:
    """Returns token ids that differ between seeds."""
    return [(37 * index + 11 * seed + 5) % vocabulary for index in range(length)]


def _largest_gap(loaded: LoadedModel, head: HeadRunner, sequence: DecodedSequence) -> float:
    """Returns the largest difference (nats) of log-probabilities from those of a forward pass."""
    ids_1T = torch.tensor([sequence.ids], device=loaded.device)
    logits_NV = head.logits(head.hidden(ids_1T)[0, :-1])
    expected = token_logprobs(logits_NV, ids_1T[0, 1:]).tolist()
    tokens = zip(sequence.sampled[1:], sequence.logprobs[1:], expected, strict=True)
    gaps = [abs(decoded - exact) for is_sampled, decoded, exact in tokens if is_sampled]
    return max(gaps, default=math.inf)
