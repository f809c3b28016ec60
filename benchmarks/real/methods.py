"""The ways to teach a student what a teacher knows, each with the same teacher rows and minutes."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from project import CONTEXT_FILE, Project
from task import gold_row, write_rows

from stillroom.tools.user.file import read_user_file
from stillroom.tools.user.pool import schemas_in

NUM_GOLD, GOLD_EPOCHS = 800, 2
RATE, ON_POLICY_RATE, DPO_RATE = 2e-4, 5e-5, 1e-5
SOFT_TARGETS = "soft_targets: {temperature: 4, top_k: 64}\n"
# More epochs than the minutes allow.
MANY = 1000
Run = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Lesson:
    """What all methods have in common."""

    project: Project
    base: str
    """The model that students start from."""
    teacher: str
    minutes: float
    """The training time of a method; of one that starts from an SFT model, half is for that."""
    teacher_rows: int
    """The number of prompts that the teacher answers."""

    def once(self, name: str, make: Callable[[], Run]) -> Run:
        """Returns what a training returned, which is done once."""
        path = self.project.folder / f"{name}.done.json"
        if not path.exists():
            path.write_text(json.dumps(make()), encoding="utf-8")
        return json.loads(path.read_text(encoding="utf-8"))

    @property
    def half(self) -> str:
        """The run of a model trained on tokens for half of the time."""
        run = self.once(
            "half", lambda: self.train("half", self.base, self.minutes / 2, _sft(self.rows))
        )
        return run["run_id"]

    @property
    def rows(self) -> str:
        """The file with the teacher's answers as rows for SFT."""
        project = self.project
        if not (project.folder / "teacher-rows.jsonl").exists():
            project.command(
                "generate-rollouts", "prompts.jsonl", "--output", "teacher.jsonl",
                "--n", self.teacher_rows, "--temperature", 0, "--seed", project.seed,
                *project.acting(self.teacher, is_teacher=True),
            )  # fmt: skip
            project.command(
                "convert-rollouts", "teacher.jsonl", "--output", "teacher-rows.jsonl",
                *self.without_context,
            )  # fmt: skip
        return "teacher-rows.jsonl"

    @property
    def without_context(self) -> list[str]:
        """The option that takes what only the teacher reads out of rows."""
        return ["--system", ""] if self.project.task.context is not None else []

    @property
    def teacher_section(self) -> str:
        """The section of a config that names the teacher."""
        has_context = self.project.task.context is not None
        context = f", context_file: {CONTEXT_FILE}" if has_context else ""
        return f"teacher: {{path: {self.teacher}{context}}}\n"

    def train(
        self, name: str, start: str, minutes: float, config: str, *, rate: float = RATE
    ) -> Run:
        """Trains all weights from `start` for some minutes."""
        sections = (
            f"model: {{path: {start}, qlora_rank: 0}}\n"
            f"trainer: {{num_epochs: {MANY}, learning_rate: {rate}, schedule: constant, "
            f"max_minutes: {minutes:g}}}\n"
        )
        return self.project.train(name, config + sections)


def _sft(rows: str) -> str:
    return f"dataset_type: sft\ndata: {{train_file: {rows}, batch_size: 8}}\n"


def train_sft(lesson: Lesson) -> Run:
    """Trains on the tokens of the teacher's answers."""
    return lesson.train("sft", lesson.base, lesson.minutes, _sft(lesson.rows))


def train_soft(lesson: Lesson) -> Run:
    """Trains on the teacher's probabilities at the tokens of the same answers."""
    config = _sft(lesson.rows) + lesson.teacher_section + SOFT_TARGETS
    return lesson.train("soft", lesson.base, lesson.minutes, config)


def train_more(lesson: Lesson) -> Run:
    """Trains on the tokens again: what the other half of the time is worth without a method."""
    return lesson.train("more", lesson.half, lesson.minutes / 2, _sft(lesson.rows))


def train_refine(lesson: Lesson) -> Run:
    """Trains on the student's failed rollouts as the teacher continues or redoes them."""
    project, start = lesson.project, lesson.half
    project.command(
        "generate-rollouts", "prompts.jsonl", "--output", "student.jsonl",
        "--n", lesson.teacher_rows, "--temperature", 1, "--seed", project.seed,
        *project.acting(start),
    )  # fmt: skip
    # The student has not read what only the teacher reads, so its turns cannot be continued.
    takeover = ["--takeover", "start"] if project.task.context is not None else []
    project.command(
        "generate-rollouts", "prompts.jsonl", "--output", "refined.jsonl",
        "--refine", "student.jsonl", "--temperature", 0, *takeover,
        *project.acting(lesson.teacher, is_teacher=True),
    )  # fmt: skip
    project.command(
        "convert-rollouts", "refined.jsonl", "--output", "refined-rows.jsonl",
        *lesson.without_context,
    )  # fmt: skip
    return lesson.train("refine", start, lesson.minutes / 2, _sft("refined-rows.jsonl"))


def train_dpo(lesson: Lesson) -> Run:
    """Trains on pairs of a right and a wrong rollout, of the student or of the teacher."""
    project, start = lesson.project, lesson.half
    project.command(
        "generate-rollouts", "prompts.jsonl", "--output", "samples.jsonl",
        "--n", lesson.teacher_rows, "--samples-per-prompt", 2, "--temperature", 1,
        "--seed", project.seed, *project.acting(start),
    )  # fmt: skip
    parts = [(project.folder / f"{name}.jsonl").read_bytes() for name in ("samples", "teacher")]
    (project.folder / "both.jsonl").write_bytes(b"".join(parts))
    project.command(
        "make-dpo-pairs", "both.jsonl", "--output", "pairs.jsonl", *lesson.without_context
    )
    config = (
        "dataset_type: dpo\ndata: {train_file: pairs.jsonl, batch_size: 8}\ndpo: {nll_coef: 0.2}\n"
    )
    return lesson.train("dpo", start, lesson.minutes / 2, config, rate=DPO_RATE)


def train_on_policy(lesson: Lesson) -> Run:
    """Lets the student answer, and the teacher score each of its tokens."""
    task = lesson.project.task
    config = (
        "dataset_type: distill\ndata: {train_file: prompts.jsonl, batch_size: 32}\n"
        f"rollout: {{max_turns: {task.max_turns}, max_tokens: {task.max_tokens}, concurrency: 32}}"
        "\nalgorithm: {substeps: 2}\n" + lesson.teacher_section
    )
    minutes = lesson.minutes / 2
    return lesson.train("on-policy", lesson.half, minutes, config, rate=ON_POLICY_RATE)


METHODS: dict[str, Callable[[Lesson], Run]] = {
    "SFT on tokens": train_sft,
    "SFT on soft targets": train_soft,
    "SFT, then more SFT": train_more,
    "SFT, then refine": train_refine,
    "SFT, then DPO": train_dpo,
    "SFT, then on-policy": train_on_policy,
}


def train_teacher(project: Project, base: str) -> Run:
    """Trains the teacher of a task on gold conversations of all forms."""
    task = project.task
    schemas: list[Any] = []
    if task.tools is not None:
        schemas = list(schemas_in(read_user_file(project.folder / "tools.py")).values())
    gold = [
        gold_row(task, row, schemas)
        for is_new in (False, True)
        for row in task.rows(1000, NUM_GOLD // 2, is_new=is_new)
    ]
    write_rows(project.folder / "gold.jsonl", gold)
    sections = (
        f"model: {{path: {base}, qlora_rank: 0}}\n"
        f"trainer: {{num_epochs: {GOLD_EPOCHS}, learning_rate: {RATE}}}\n"
    )
    return project.train("teacher", _sft("gold.jsonl") + sections)


def few_shot(project: Project) -> str:
    """Returns the system message with five examples of training prompts and their answers."""
    task = project.task
    examples = task.rows(project.seed, 5, is_new=False)
    lines = [f"Input: {row['prompt']}\nAnswer: {row['answer']}" for row in examples]
    return "\n\n".join([task.context or task.system, *lines])


def model_folder(run: Run, project: Project) -> Path:
    """Returns the folder with a trained model."""
    return project.folder / "runs" / run["run_id"] / "checkpoints" / "final"
