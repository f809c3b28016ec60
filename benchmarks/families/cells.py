"""What the table of families measures: each use of a family's tiny model, beside plain transformers and peft.

A cell is a function that returns its figures, or raises: an EngineError is a refusal, InexactError a difference beyond the limits.
"""

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import anyio
import limits
import msgspec
import plain
import torch
from limits import DPO_LOSS, GRADIENT, LOGPROB, LOSS, WEIGHTS

from fakes.conversations import answer, user
from fakes.decoding import engine_for, run_to_end, sequence_of
from fakes.families import FAMILIES, FamilyShape, save_family
from fakes.multimodal import FAMILIES as MULTIMODAL
from fakes.multimodal import save_multimodal
from fakes.reporters import KeptReporter
from fakes.tiny_models import ANSWER, CALL
from fakes.training import PRICE_TOOL, Project, make_project
from stillroom.evaluate.request import EvaluateModel
from stillroom.evaluate.run import evaluate_model
from stillroom.export.request import ExportModel
from stillroom.export.run import export_model
from stillroom.models.batches import TokenSequence
from stillroom.models.load import LoadedModel, load_model
from stillroom.models.resolve import ModelLocation
from stillroom.policy.check import check_decoding
from stillroom.policy.sequences import DecodedSequence
from stillroom.rollout.request import GenerateRollouts
from stillroom.rollout.run import generate_rollouts
from stillroom.settings import Workspace
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.train.config.distill_sections import AlgorithmSection
from stillroom.train.config.sections import DpoSection, ModelSection, TrainerSection
from stillroom.train.loop.checkpoints import save_checkpoint
from stillroom.train.methods.dpo import ReferencedPair, TokenPair, accumulate_preference
from stillroom.train.methods.sft import accumulate_loss
from stillroom.train.on_policy.policy_update import UpdateStats, accumulate_gradient
from stillroom.train.on_policy.training_sequences import TrainingSequence
from stillroom.train.student.model import Student, load_student
from stillroom.types import SamplingSettings

TEMPLATE, RANK = "clerk", 4
ITEMS = ("lamp", "chair", "table", "red chair")
SCHEMA = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "The price of an item.",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string"}},
            "required": ["item"],
            "additionalProperties": False,
        },
    },
}
Figures = dict[str, float]


class InexactError(Exception):
    """A number is further from plain transformers' than the limits allow."""


def within(limit: float, **found: float) -> Figures:
    for name, value in found.items():
        if not value <= limit:
            raise InexactError(f"{name} differs by {value:.1e}, more than {limit:.0e}")
    return found


def relative(ours: float, expected: float) -> float:
    return abs(ours - expected) / max(abs(expected), 1e-9)


def gap(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Returns the largest difference of gradients as a share of the largest number; none may be missing."""
    if missing := sorted(ours.keys() ^ expected.keys()):
        # What neither side's loss depends on may have zeros on one side and nothing on the other.
        present = [(ours | expected)[name] for name in missing]
        if any(bool(gradient.any()) for gradient in present):
            raise InexactError(
                f"only one side has a gradient of {missing[0]} ({len(missing)} in all)"
            )
    both = ours.keys() & expected.keys()
    largest = max(expected[name].abs().max().item() for name in both)
    return max((ours[name] - expected[name]).abs().max().item() for name in both) / largest


@dataclass(frozen=True)
class Family:
    """One family's tiny models in a workspace, and what was made of them."""

    name: str
    root: Path

    @property
    def is_multimodal(self) -> bool:
        return self.name.endswith(" checkpoint")

    @property
    def shape(self) -> FamilyShape:
        name = self.name.removesuffix(" checkpoint")
        return FAMILIES[MULTIMODAL[name].text if self.is_multimodal else name]

    def folder(self, seed: int) -> Path:
        """Returns the folder of the base (seed 0) or of the teacher (seed 1)."""
        name = self.name.removesuffix(" checkpoint")
        save = save_multimodal if self.is_multimodal else save_family
        return save(self.root / "models", name, seed=seed, template=TEMPLATE)

    @cached_property
    def workspace(self) -> Workspace:
        return Workspace(self.root)

    def student(self, rank: int = 0) -> Student:
        """Returns a student to train; an adapter's weights are not zero, as after training."""
        section = ModelSection(path=str(self.folder(0)), qlora_rank=rank)
        student = load_student(self.workspace, section, seed=0)
        torch.manual_seed(1)
        for name, weight in student.module.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.05)
        return student

    def reference(self, student: Student) -> Any:
        """Returns plain transformers' or peft's model with the same weights and the same trained ones."""
        if not student.is_adapter:
            return plain.load(self.folder(0))
        folder = self.root / "reference"
        student.module.save_pretrained(folder, save_embedding_layers=False)
        return plain.load_adapter(self.folder(0), folder, is_trainable=True)

    def rows(self, *, seed: int = 0) -> list[TokenSequence]:
        """Returns sequences of mixed lengths on both sides of each boundary, some with a common start."""
        draw = random.Random(seed)
        start = [draw.randrange(30, 350) for _ in range(6)]
        lengths = [*self.shape.lengths, 12, max(self.shape.lengths) // 2 + 3]
        draw.shuffle(lengths)
        ids = [([*start] + [draw.randrange(30, 350) for _ in range(n)])[:n] for n in lengths]
        return [TokenSequence(row, [i % 4 != 1 for i in range(len(row))]) for row in ids]

    def project(self, method: str, name: str, *, rank: int, **sections: Any) -> Project:
        """Returns a project in the folder `name` of the workspace."""
        folder = self.root / name
        folder.mkdir(exist_ok=True)
        model = {"qlora_rank": rank, **sections.pop("model", {})}
        return make_project(folder, method, self.folder(0), model=model, **sections)


def exact_step(
    family: Family, student: Student, losses: Callable[[Any], tuple[float, float]], *, limit: float
) -> Figures:
    """Compares one step's loss and gradient, and the checkpoint after the step with what it is read back as."""
    reference = family.reference(student)
    ours, expected = losses(reference)
    figures = within(limit, loss=relative(ours, expected))
    figures |= within(
        GRADIENT, gradient=gap(plain.gradients(student.module), plain.gradients(reference))
    )
    optimizer = student.optimizer(TrainerSection(num_epochs=1, learning_rate=1e-2), total_steps=1)
    losses(reference)
    optimizer.step()
    run = family.root / "runs" / f"exact-{random.Random().randrange(10**9)}"
    folder = save_checkpoint(run, student, method="sft", step=1, is_final=True)
    read = (
        plain.load_adapter(family.folder(0), folder) if student.is_adapter else plain.load(folder)
    )
    with torch.no_grad():
        student.module.eval()
        ids = family.rows(seed=7)[0].ids
        kept = (plain.logits(student.module, ids) - plain.logits(read, ids)).abs().max().item()
    return figures | within(1e-5, reload=kept)


def sft(family: Family, rank: int) -> Figures:
    student, rows = family.student(rank), family.rows()

    def losses(reference: Any) -> tuple[float, float]:
        return accumulate_loss(student, rows).loss, plain.nll(reference, rows)

    figures = exact_step(family, student, losses, limit=LOSS)
    for epochs, rate in ((60, 1e-2), (150, 3e-3)) if rank == 0 else ((8, 2e-2),):
        trainer = {"num_epochs": epochs, "learning_rate": rate}
        project = family.project(
            "sft", f"sft-{rank}", rank=rank, trainer=trainer, data={"batch_size": 4}
        )
        project.write(lessons())
        project.train()
        measured = [metrics["loss"] for metrics in project.reporter.measured]
        if measured[-1] < 0.05:
            break
        # Some families learn only slowly.
        if rank == 0 and rate == 1e-2:
            shutil.rmtree(family.root / "sft-0")
    if not measured[-1] < 0.8 * measured[0]:
        raise InexactError(f"the loss fell only from {measured[0]:.2f} to {measured[-1]:.2f}")
    return figures | {"loss_first": measured[0], "loss_last": measured[-1]}


def lessons() -> list[dict[str, Any]]:
    """Returns conversations in which a tool is called and its reply is passed on."""
    reply = {"role": "tool", "content": "12"}
    return [
        {
            "messages": [user(f"Price of the {item}?"), answer(CALL), reply, answer(ANSWER)],
            "tools": [SCHEMA],
        }
        for item in ITEMS
    ]


def dpo(family: Family) -> Figures:
    student, rows = family.student(), family.rows(seed=2)
    draw = random.Random(3)
    longer = [
        TokenSequence([*row.ids[:-1], 31, 32, 33], [*row.trained[:-1], True, True, True])
        for row in rows
    ]
    pairs = []
    with torch.no_grad():
        for chosen, rejected in zip(rows, longer, strict=True):
            own = [
                plain.trained_logprobs(student.module, one).sum().item()
                for one in (chosen, rejected)
            ]
            pairs.append(
                ReferencedPair(
                    TokenPair(chosen, rejected), *(value + draw.gauss(0, 2) for value in own)
                )
            )
    settings = DpoSection(beta=0.1)

    def losses(reference: Any) -> tuple[float, float]:
        student.module.eval()
        return accumulate_preference(student, pairs, settings).loss, plain.preference(
            reference, pairs, beta=0.1
        )

    figures = exact_step(family, student, losses, limit=DPO_LOSS)
    project = family.project(
        "dpo",
        "dpo",
        rank=RANK,
        trainer={"num_epochs": 4, "learning_rate": 1e-2},
        data={"batch_size": 2},
    )
    project.write(
        [
            {
                "prompt": [user(f"Price of the {item}?")],
                "chosen": [answer(ANSWER)],
                "rejected": [answer("No.")],
            }
            for item in ITEMS
        ]
    )
    project.train()
    margin = project.reporter.measured[-1]["margin"]
    if not margin > 0:
        raise InexactError(f"the margin after training is {margin:.2g}")
    return figures | {"margin": margin}


def distill(family: Family) -> Figures:
    student, rows = family.student(), family.rows(seed=4)
    teacher_model = plain.load(family.folder(1))
    location = ModelLocation("teacher", str(family.folder(1)), is_local=True)
    teacher = LocalTeacher(load_model(family.workspace, location))
    sequences = [TrainingSequence(row, [0.0] * row.num_trained) for row in rows]
    algorithm = AlgorithmSection(loss_fn="full_reverse_kl")

    def losses(reference: Any) -> tuple[float, float]:
        student.module.eval()
        stats = UpdateStats()
        accumulate_gradient(student, {0: teacher}, sequences, algorithm, stats)
        return stats.loss / stats.num_tokens, plain.reverse_kl(reference, teacher_model, rows)

    figures = exact_step(family, student, losses, limit=LOSS)
    project = family.project(
        "distill",
        "distill",
        rank=RANK,
        teacher={"path": str(family.folder(1))},
        rollout={"max_tokens": 24},
        data={"batch_size": 2, "group_size": 2},
        trainer={"num_epochs": 1, "learning_rate": 1e-2},
    )
    project.write([{"prompt": f"Price of the {item}?"} for item in ITEMS])
    project.train()
    sampler = max(metrics["logprob_gap"] for metrics in project.reporter.measured)
    return figures | within(LOGPROB, sampler=sampler)


def generate(family: Family) -> Figures:
    """Compares greedy turns around tool replies, then lets a trained checkpoint call a tool."""
    loaded = load_model(
        family.workspace, ModelLocation("base", str(family.folder(0)), is_local=True)
    )
    check_decoding(loaded)
    reference = plain.load(family.folder(0))
    turns = greedy_turns(family, loaded, reference)
    sampled = sampled_logprobs(family, loaded, reference)
    figures = within(LOGPROB, sampled=sampled) | {"turns": turns}
    folder = family.root / "sft-0"
    (folder / "tools.py").write_text(PRICE_TOOL, encoding="utf-8")
    (folder / "prompts.txt").write_text(
        "".join(f"Price of the {item}?\n" for item in ITEMS), encoding="utf-8"
    )
    request = GenerateRollouts(
        model="run-1", input="prompts.txt", output="out.jsonl", tools="tools.py", temperature=0.0, max_tokens=40, max_turns=3
    )  # fmt: skip
    operation = partial(
        generate_rollouts, folder=run_folder(folder, "rollouts"), reporter=KeptReporter()
    )
    anyio.run(operation, Workspace(folder), request)
    written = [
        msgspec.json.decode(line) for line in (folder / "out.jsonl").read_bytes().splitlines()
    ]
    calls = sum(message.get("role") == "tool" for row in written for message in row["messages"])
    right = sum(ANSWER in str(row["messages"][-1].get("content")) for row in written)
    if calls < len(ITEMS) or right < len(ITEMS):
        raise InexactError(
            f"the trained checkpoint made {calls} tool calls and gave {right} of {len(ITEMS)} answers"
        )
    return figures | {"tool_calls": float(calls)}


def greedy_turns(family: Family, loaded: LoadedModel, reference: Any) -> float:
    """Returns the number of greedy turns that were those of transformers' generate."""
    count, greedy = 6, SamplingSettings(temperature=0.0, max_tokens=6)
    draw = random.Random(5)
    lengths = [*family.shape.lengths[:3], 1, max(family.shape.lengths)]
    prompts = [[draw.randrange(30, 350) for _ in range(n)] for n in lengths]
    replies = {i: [[draw.randrange(30, 350) for _ in range(draw.choice((1, 7, 20)))] for _ in range(2)] for i in range(len(lengths))}  # fmt: skip
    sequences = [sequence_of(prompt, greedy) for prompt in prompts]
    engine = engine_for(loaded, max_rows=3)
    ends: list[tuple[DecodedSequence, int, list[int]]] = []
    started = {id(sequence): len(sequence.ids) for sequence in sequences}

    def more(sequence: DecodedSequence) -> None:
        ends.append((sequence, started[id(sequence)], list(sequence.ids)))
        if reply := replies[sequences.index(sequence)]:
            sequence.append_given(reply.pop())
            started[id(sequence)] = len(sequence.ids)
            engine.request_turn(sequence)

    for sequence in sequences:
        engine.request_turn(sequence)
    run_to_end(engine, more)
    for _, start, ids in ends:
        expected = plain.next_tokens(reference, ids[:start], stops=loaded.stop_ids, count=count)
        for offset, (ours, theirs_id) in enumerate(zip(ids[start:], expected, strict=False)):
            if ours != theirs_id:
                if plain.is_tie(reference, ids[: start + offset], ours, theirs_id):
                    break
                raise InexactError(
                    f"a greedy turn after {start} tokens says {ours} where generate says {theirs_id}"
                )
    return float(len(ends))


def sampled_logprobs(family: Family, loaded: LoadedModel, reference: Any) -> float:
    """Returns the largest difference (nats) of sampled tokens' log-probabilities from one unpadded pass."""
    settings = SamplingSettings(temperature=1.0, max_tokens=16)
    draw = random.Random(6)
    prompts = [[draw.randrange(30, 350) for _ in range(n)] for n in (*family.shape.lengths, 1)]
    sequences = [sequence_of(prompt, settings, seed=i) for i, prompt in enumerate(prompts)]
    engine = engine_for(loaded, max_rows=4)
    for sequence in sequences:
        engine.request_turn(sequence)
    run_to_end(engine)
    worst = 0.0
    with torch.no_grad():
        for sequence in sequences:
            worst = max(worst, largest_gap(reference, sequence))
    return worst


def largest_gap(reference: Any, sequence: DecodedSequence) -> float:
    """Returns the largest difference of one sequence's log-probabilities (nats).

    The reference is one pass over the whole conversation, as a trainer makes.
    """
    ids, at = sequence.ids, [i for i, is_sampled in enumerate(sequence.sampled) if is_sampled]
    all_TV = plain.logits(reference, ids).double().log_softmax(-1)
    each = [all_TV[i - 1, ids[i]].item() for i in at]
    return max(abs(sequence.logprobs[i] - value) for i, value in zip(at, each, strict=True))


def run_folder(folder: Path, name: str) -> Path:
    """Returns a run's folder in a workspace, made if it is not there."""
    run = folder / "runs" / name
    run.mkdir(parents=True, exist_ok=True)
    return run


def evaluate(family: Family) -> Figures:
    """Compares the accuracy of the trained checkpoint with the greedy answers of plain transformers."""
    folder = family.root / "sft-0"
    (folder / "tools.py").write_text(PRICE_TOOL, encoding="utf-8")
    rows = [
        {"prompt": f"Price of the {item}?", "metadata": {"expected_answer": "12"}} for item in ITEMS
    ]
    (folder / "held.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    request = EvaluateModel(
        model="run-1", data="held.jsonl", tools="tools.py", max_tokens=40, max_turns=3,
        teacher=str(family.folder(1)), kl_prompts=4,
    )  # fmt: skip
    operation = partial(
        evaluate_model, folder=run_folder(folder, "evaluation"), reporter=KeptReporter()
    )
    result = anyio.run(operation, Workspace(folder), request)
    if result.accuracy.value != 1.0 or result.failed:
        raise InexactError(
            f"the accuracy is {result.accuracy.value:.2f} where every answer was trained"
        )
    return {"accuracy": result.accuracy.value, "teacher_kl": result.teacher_kl.value}


def export(family: Family, form: str) -> Figures:
    """Compares an exported model in plain transformers or peft with its checkpoint."""
    folder = family.root / f"sft-{RANK}"
    work = run_folder(folder, f"export-{form}")
    request = ExportModel(model="run-1", output=f"out-{form}", format=form)
    export_model(Workspace(folder), request, folder=work, reporter=KeptReporter())
    adapter = folder / "runs" / "run-1" / "checkpoints" / "final"
    checkpoint = plain.load_adapter(family.folder(0), adapter)
    written = folder / f"out-{form}"
    if family.is_multimodal and (missing := plain.lost_towers(family.folder(0), written, form)):
        raise InexactError(missing)
    read = (
        plain.load(written) if form == "merged" else plain.load_adapter(family.folder(0), written)
    )
    rows = family.rows(seed=8)
    found = logits_gap(checkpoint, read, rows)
    limit = WEIGHTS
    if form == "merged" and found > limit:
        # No merging is nearer than this one, which rounds each weight once. That matters in a model
        # that has learnt to amplify its rounding: Qwen3.5's gated delta nets do after so steep a training.
        limit = 1.5 * logits_gap(checkpoint, plain.merged(family.folder(0), adapter), rows)
    return within(limit, logits=found)


def logits_gap(expected: Any, model: Any, rows: list[TokenSequence]) -> float:
    """Returns the largest difference of two models' logits as a share of the largest."""
    with torch.no_grad():
        each = [(plain.logits(expected, row.ids), plain.logits(model, row.ids)) for row in rows]
    return max(((a - b).abs().max() / a.abs().max()).item() for a, b in each)


CELLS: dict[str, Callable[[Family], Figures]] = {
    limits.SFT_FULL: lambda family: sft(family, 0),
    limits.SFT_LORA: lambda family: sft(family, RANK),
    limits.DPO: dpo,
    limits.DISTILL: distill,
    limits.GENERATE: generate,
    limits.EVALUATE: evaluate,
    limits.MERGED: lambda family: export(family, "merged"),
    limits.ADAPTER: lambda family: export(family, "adapter"),
}
