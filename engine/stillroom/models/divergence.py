"""Divergences between two models' next-token distributions.

Shapes: N positions, V vocabulary (of the larger model where they differ by padding).
"""

import torch
from torch import Tensor


def full_reverse_kl(student_NV: Tensor, teacher_NV: Tensor) -> Tensor:
    """Returns KL(student || teacher) at each position over the whole vocabulary, [N].

    student_NV, teacher_NV: logits; the gradient flows into the student's. Columns that only one
    of them has are padding of its vocabulary and are left out.
    """
    shared = min(student_NV.shape[1], teacher_NV.shape[1])
    student_NV, teacher_NV = student_NV[:, :shared], teacher_NV[:, :shared]
    student_NV = torch.log_softmax(student_NV, dim=-1)
    teacher_NV = torch.log_softmax(teacher_NV, dim=-1)
    probabilities_NV = student_NV.exp()
    # where, not multiply alone: 0 * (-inf - -inf) is nan.
    terms_NV = torch.where(probabilities_NV > 0, probabilities_NV * (student_NV - teacher_NV), 0.0)
    return terms_NV.sum(dim=-1)
