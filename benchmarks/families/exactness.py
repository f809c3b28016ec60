"""Compares losses, gradients and scores of each family's tiny model with plain transformers.

Each is computed as a run computes it, in batches of mixed lengths on both sides of every boundary;
the reference runs each sequence alone and without a cache, on a model of its own.
A JSON line for each family and way of training: `python benchmarks/families/exactness.py [NAME …]`.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from fakes.families import FAMILIES, FamilyShape, save_family
from stillroom.models.batches import TokenSequence
from stillroom.models.load import load_model
from stillroom.models.resolve import locate_model
from stillroom.models.rope import forget_longer_passes
from stillroom.settings import Workspace
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.train.config.schema import DpoSection, ModelSection
from stillroom.train.methods.dpo import accumulate_preference, add_reference
from stillroom.train.methods.sft import accumulate_nll
from stillroom.train.student.encode import TokenPair
from stillroom.train.student.model import Student, load_student, new_adapter

LIMITS = {"sft_loss": 2e-5, "sft_gradient": 2e-3, "dpo_loss": 2e-4, "logprobs": 1e-3}
"""The largest errors that count as exact: relative ones, and nats for the log-probabilities."""

_LEAST_SHARE = 1e-3
"""Parameters whose gradient is a smaller share of the whole are compared with that share."""


@dataclass(frozen=True, slots=True)
class Exactness:
    """The errors of one family's model, trained in one way."""

    family: str
    method: str
    """full or lora."""
    layout: str
    """How sequences run: packed, padded or alone."""
    sft_loss: float
    sft_gradient: float
    dpo_loss: float
    logprobs: float
    notes: list[str]

    @property
    def is_exact(self) -> bool:
        """Whether no error is beyond its limit."""
        return all(getattr(self, name) <= limit for name, limit in LIMITS.items())


def measure(root: Path, family: str, *, is_lora: bool) -> Exactness:
    """Returns the errors of a family's model, which is saved below `root`."""
    folder = save_family(root, family)
    section = ModelSection(path=str(folder), qlora_rank=4 if is_lora else 0)
    student = load_student(Workspace(root), section, seed=0)
    _change_adapter(student)
    plain = _plain_copy(student, folder, section)
    sequences = list(_sequences(FAMILIES[family]))

    loss = accumulate_nll(student, sequences).loss
    ours = _gradients(student.module)
    expected = _plain_nll(plain, sequences)
    expected.backward()
    gradient = _gradient_error(ours, _gradients(plain))

    return Exactness(
        family,
        "lora" if is_lora else "full",
        student.head.rules.layout,
        sft_loss=abs(loss / expected.item() - 1),
        sft_gradient=gradient,
        dpo_loss=_dpo_error(student, plain, sequences),
        logprobs=_score_error(root, folder, sequences),
        notes=student.head.notes,
    )


def _sequences(shape: FamilyShape) -> Iterator[TokenSequence]:
    """Yields sequences at each length, of which every other one begins like the one before."""
    draw = torch.Generator().manual_seed(1)
    longest = max(shape.lengths)
    rows = torch.randint(3, 350, (len(shape.lengths), longest), generator=draw).tolist()
    for index, length in enumerate(shape.lengths):
        ids = rows[index - index % 2][: length // 2] + rows[index][length // 2 : length]
        yield TokenSequence(ids, [place % 5 != 1 for place in range(length)])


def _change_adapter(student: Student) -> None:
    """Gives a new adapter's matrices, of which half are zeros, random numbers."""
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in student.module.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)


def _plain_copy(student: Student, folder: Path, section: ModelSection) -> Any:
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if section.qlora_rank:
        plain = new_adapter(plain, section)
        plain.load_state_dict(student.module.state_dict())
    forget_longer_passes(plain)
    return plain.eval()


def _plain_logprobs(plain: Any, sequence: TokenSequence) -> Tensor:
    """Returns the log-probabilities of the sequence's trained tokens."""
    ids = torch.tensor([sequence.ids])
    logprobs = plain(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    every = logprobs.gather(1, ids[0, 1:, None])[:, 0]
    return every[torch.tensor(sequence.trained[1:])]


def _plain_nll(plain: Any, sequences: Sequence[TokenSequence]) -> Tensor:
    return -torch.cat([_plain_logprobs(plain, one) for one in sequences]).mean()


def _gradients(model: Any) -> dict[str, Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def _gradient_error(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Returns the largest error of a parameter's gradient, as a share of its length."""
    least = _LEAST_SHARE * sum(g.square().sum().item() for g in expected.values()) ** 0.5
    errors = [
        (ours.get(name, torch.zeros_like(g)) - g).norm().item() / max(g.norm().item(), least)
        for name, g in expected.items()
    ]
    return max(errors)


def _dpo_error(student: Student, plain: Any, sequences: Sequence[TokenSequence]) -> float:
    """Returns the relative error of DPO's loss on pairs of sequences of different lengths."""
    settings = DpoSection()
    half = len(sequences) // 2
    pairs = [TokenPair(*both) for both in zip(sequences[:half], reversed(sequences), strict=False)]
    with torch.no_grad():
        before = [_plain_margin(plain, pair) for pair in pairs]
        referenced = add_reference(student, pairs, is_mean=False)
        for model in (student.module, plain):
            torch.manual_seed(3)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1 + 0.02 * torch.randn_like(parameter))
        after = [_plain_margin(plain, pair) for pair in pairs]
    margins = torch.tensor(after) - torch.tensor(before)
    expected = -torch.nn.functional.logsigmoid(settings.beta * margins).mean().item()
    loss = accumulate_preference(student, referenced, settings).loss
    return abs(loss / expected - 1)


def _plain_margin(plain: Any, pair: TokenPair) -> float:
    chosen, rejected = (_plain_logprobs(plain, one) for one in (pair.chosen, pair.rejected))
    return (chosen.double().sum() - rejected.double().sum()).item()


def _score_error(root: Path, folder: Path, sequences: Sequence[TokenSequence]) -> float:
    """Returns the largest error (nats) of a teacher's scores."""
    workspace = Workspace(root)
    teacher = LocalTeacher(load_model(workspace, locate_model(workspace, str(folder))))
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    forget_longer_passes(plain)
    with torch.no_grad():
        pairs = zip(teacher.score_tokens(sequences), sequences, strict=True)
        errors = [(scores - _plain_logprobs(plain, one)).abs().max() for scores, one in pairs]
    return max(errors).item()


def main() -> None:
    """Prints a line for each family and way of training; fails if one is not exact."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=[], metavar="NAME")
    names = parser.parse_args().families or list(FAMILIES)
    torch.set_num_threads(1)
    inexact: list[str] = []
    with tempfile.TemporaryDirectory() as root:
        for name in names:
            for is_lora in (False, True):
                result = measure(Path(root), name, is_lora=is_lora)
                print(json.dumps(dataclasses.asdict(result)), flush=True)
                inexact += [] if result.is_exact else [name]
    if inexact:
        sys.exit(f"not exact: {', '.join(dict.fromkeys(inexact))}")


if __name__ == "__main__":
    main()
