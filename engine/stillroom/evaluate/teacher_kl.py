"""How far a model is from a teacher: the exact reverse KL per token on the model's own samples.

Shapes: N sampled tokens of a batch.
"""

from collections.abc import Sequence

import torch

from stillroom.evaluate.intervals import Estimate, ratio_estimate
from stillroom.evaluate.request import EvaluateModel
from stillroom.models.batches import TokenSequence, collate, microbatches
from stillroom.models.divergence import full_reverse_kl
from stillroom.models.load import load_model
from stillroom.models.pairing import check_pair
from stillroom.models.resolve import locate_model
from stillroom.rollout.request import locate_policy
from stillroom.settings import Workspace
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.types import Trajectory


@torch.no_grad()
def measure_teacher_kl(
    workspace: Workspace, request: EvaluateModel, teacher: str, rollouts: Sequence[Trajectory]
) -> Estimate:
    """Returns KL(model || teacher) per token (nats) over the whole vocabulary.

    Rollouts are what is taken to be independent.

    Raises ModelError if the two do not share tokens and chat template.
    """
    student = load_model(workspace, locate_policy(workspace, request))
    scorer = load_model(workspace, locate_model(workspace, teacher))
    check_pair(student, scorer)
    ours, theirs = LocalTeacher(student), LocalTeacher(scorer)
    sequences = [
        TokenSequence(rollout.tokens.ids, rollout.tokens.sampled)
        for rollout in rollouts
        if rollout.tokens is not None and any(rollout.tokens.sampled)
    ]
    sums: list[float] = []
    sizes: list[int] = []
    lengths = [len(sequence.ids) for sequence in sequences]
    for group in microbatches(lengths, max_tokens=4096):
        members = [sequences[i] for i in group]
        batch = collate(members, device=student.device)
        kl_N = full_reverse_kl(ours.logits(batch), theirs.logits(batch))
        counts = [member.num_trained for member in members]
        sums += [part.sum().item() for part in kl_N.split(counts)]
        sizes += counts
    return ratio_estimate(sums, sizes)
