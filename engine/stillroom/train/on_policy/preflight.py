"""What is measured of student and teacher before the first rollout is paid for.

Shapes: N sampled tokens.
"""

import functools
import random
from typing import Any

import anyio
import torch

from stillroom.data.chat.render import ChatRenderer
from stillroom.errors import ModelError
from stillroom.models.batches import TokenSequence
from stillroom.models.scoring import OFF_POLICY_ROUTE
from stillroom.policy.decode import DecodeEngine
from stillroom.policy.sequences import DecodedSequence
from stillroom.serving.preflight import check_served
from stillroom.settings import Workspace
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.train.config.distill_sections import AlgorithmSection
from stillroom.train.config.schema import TrainConfig
from stillroom.train.config.teacher_servers import served_teacher
from stillroom.train.on_policy.token_scores import score_with_teacher
from stillroom.train.student.model import Student
from stillroom.types import Message, SamplingSettings

PROBE: list[Message] = [
    {"role": "user", "content": "Name three colours, and say why you like them."}
]
"""What the student answers for the measurement."""
_NUM_TOKENS = 24
_NUM_ANSWERS = 2
# Nats a token, on average: rounding in half precision adds up over the layers.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_HALF_TOLERANCE = 0.1


def check_contract(workspace: Workspace, config: TrainConfig, student: Student) -> list[str]:
    """Returns what was found of the student and a served teacher, as notes.

    One in this process is checked as it is loaded (`pairing`).
    Raises an EngineError if rollouts could not be scored as they are meant.
    """
    notes = check_numbers(student, config.algorithm)
    most = min(student.loaded.max_context, config.rollout.max_context_window)
    return notes + check_teacher_server(
        workspace, config, student.loaded.tokenizer, max_context=most
    )


def check_teacher_server(
    workspace: Workspace, config: TrainConfig, tokenizer: Any, *, max_context: int
) -> list[str]:
    """Returns what was found of a served teacher, as notes; none of one in this process."""
    notes: list[str] = []
    for one in dict.fromkeys(config.teachers):
        if one.section.is_served:
            served = served_teacher(workspace, one, top_k=config.algorithm.num_teacher_tokens)
            check = functools.partial(check_served, max_context=max_context)
            notes += anyio.run(check, workspace, one.tokenizer, served, tokenizer)
    return notes


def check_numbers(student: Student, algorithm: AlgorithmSection) -> list[str]:
    """Returns what sampler, trainer and teacher's code say of the same tokens, as notes.

    The student is its own teacher here, which must find nothing to teach.
    Raises ModelError if they differ by more than rounding.
    """
    answers = _answers(student)
    if not answers:
        return ["the student's first token ended its turn, so nothing was measured"]
    sequences = [TokenSequence(one.ids, one.sampled) for one in answers]
    batch = student.collate(sequences)
    twin = LocalTeacher(student.loaded)
    with torch.no_grad():
        scores = score_with_teacher(student, twin, batch, batch, algorithm)
    told = [value for one in answers for value in one.trace().sampled_logprobs]
    sampler_N = torch.tensor(told, device=scores.student_N.device)
    gap = (scores.student_N - sampler_N).abs().mean().item()
    kl = (scores.student_N - scores.teacher_N).abs().mean().item()
    tolerance = _TOLERANCE.get(student.loaded.model.dtype, _HALF_TOLERANCE)
    if not gap <= tolerance:
        raise ModelError(
            f"sampler and trainer differ by {gap:.3g} nats a token (at most {tolerance:g} is "
            "rounding), so ratios between them would mean nothing",
            f"set model.precision: fp32, or {OFF_POLICY_ROUTE}",
        )
    if not kl <= tolerance:
        raise ModelError(
            f"a teacher that is the student itself would teach {kl:.3g} nats a token (at most "
            f"{tolerance:g} is rounding)",
            f"set model.precision: fp32, or {OFF_POLICY_ROUTE}",
        )
    note = (
        f"sampler and trainer agree to {gap:.1e} nats a token over {len(told)} sampled tokens; the "
        f"student as its own teacher has a KL of {kl:.1e}"
    )
    return [note]


def _answers(student: Student) -> list[DecodedSequence]:
    """Returns short answers as they are sampled in training."""
    loaded = student.loaded
    student.module.eval()
    prompt = ChatRenderer(loaded.tokenizer).prompt_ids(PROBE, [])
    limit = min(loaded.max_context, len(prompt) + _NUM_TOKENS)
    engine = DecodeEngine(loaded, max_rows=_NUM_ANSWERS, max_context=limit)
    settings = SamplingSettings(temperature=1.0, max_tokens=_NUM_TOKENS)
    sequences = [DecodedSequence(settings, random.Random(seed)) for seed in range(_NUM_ANSWERS)]
    for sequence in sequences:
        sequence.give(prompt)
        engine.ask(sequence)
    while engine.has_work:
        engine.step()
    return [sequence for sequence in sequences if any(sequence.sampled)]
