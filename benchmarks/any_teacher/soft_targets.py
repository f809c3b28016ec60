"""Soft targets beside hard labels on the same teacher rollouts, at equal compute of the student.

    python benchmarks/any_teacher/soft_targets.py FOLDER [--only main temperature ...]
    python benchmarks/any_teacher/soft_targets.py FOLDER --summary

The demo's teacher answers 300 prompts; the base student is trained on those that it solved, with
the rows' own tokens (hard) or with the teacher's probabilities at the same tokens. All arms see the
same rows in the same order, so the student's compute is equal for equal epochs; the teacher's
passes are not counted. Learning rates are chosen on held-out tasks 300 to 449 of the first seed,
results are on tasks 0 to 299. One JSON line per arm; what is in FOLDER/results.jsonl is not done
again. About 20 CPU seconds an arm.
"""

import argparse
import sys
import time
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "on_policy"))
sys.path.append(str(Path(__file__).parents[2] / "tests"))

import anyio
import msgspec
from demo_world import ACTING, DemoWorld, Results, policy

from fakes.reporters import KeptReporter
from stillroom.api import EvaluateModel
from stillroom.evaluate.files import Evaluation
from stillroom.evaluate.intervals import mean_estimate
from stillroom.evaluate.run import evaluate_model

RATES = (6e-3, 1e-2, 2e-2, 3e-2)
NUM_CHOOSING = 150


@dataclass(frozen=True)
class Arm:
    """A way of training the base student: the settings of soft_targets, or None for hard labels."""

    settings: dict[str, object] | None
    epochs: int = 6
    seeds: tuple[int, ...] = (1, 2)
    rates: tuple[float, ...] = ()
    """The learning rates to choose from; () takes those chosen for hard or for soft."""
    iterations: int = 0
    """The iterations of on-policy distillation that follow."""
    start: str = field(default="")
    """The arm whose student goes on."""


SOFT = {"temperature": 4}
ALL = (1, 2, 3)
KINDS: dict[str, dict[str, Arm]] = {
    "main": {
        "hard": Arm(None, seeds=ALL, rates=RATES),
        "soft": Arm(SOFT, seeds=ALL, rates=RATES),
    },
    "k": {
        "soft, top 64": Arm({**SOFT, "top_k": 64}, seeds=ALL),
        "soft, top 16": Arm({**SOFT, "top_k": 16}),
    },
    "temperature": {
        "soft, T 1": Arm({"temperature": 1}, rates=(6e-3, 2e-2)),
        "soft, T 2": Arm({"temperature": 2}),
        "soft, T 8": Arm({"temperature": 8}),
    },
    "divergence": {
        "jsd, T 4": Arm({**SOFT, "loss": "jsd"}),
        "reverse KL, T 4": Arm({**SOFT, "loss": "reverse_kl"}),
        "soft + 0.5 hard": Arm({**SOFT, "label_coef": 0.5}),
    },
    "epochs": {
        "hard, 3 epochs": Arm(None, epochs=3),
        "soft, 3 epochs": Arm(SOFT, epochs=3),
        "hard, 12 epochs": Arm(None, epochs=12),
        "soft, 12 epochs": Arm(SOFT, epochs=12),
    },
    "on-policy": {
        "soft → on-policy, 20": Arm(SOFT, iterations=20, start="soft"),
        "hard → on-policy, 20": Arm(None, iterations=20, start="hard"),
        "soft → on-policy, 40": Arm(SOFT, iterations=40, start="soft"),
    },
}


def file_name(arm: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in arm)


def train(world: DemoWorld, name: str, arm: Arm, rate: float, start: str | None):
    """Trains one arm; on-policy arms go on from the model `start`."""
    label = f"{file_name(name)}-{rate:g}"
    if start is not None:
        overrides = [
            f"model.path={start}", f"trainer.max_steps={arm.iterations}", "trainer.num_epochs=1000",
        ]  # fmt: skip
        return world.train(label, "distill.yml", overrides)
    overrides = [
        f"data.train_file={world.teacher_rows(300)}",
        "model.path=demo/student",
        f"trainer.num_epochs={arm.epochs}",
        f"trainer.learning_rate={rate}",
        *(["teacher.path=demo/teacher"] if arm.settings is not None else []),
        *(f"soft_targets.{key}={value}" for key, value in (arm.settings or {}).items()),
    ]
    return world.train(label, "hard.yml", overrides)


def choosing_accuracy(world: DemoWorld, label: str, model: str) -> float:
    """Returns the accuracy on held-out tasks that no result is reported on."""
    file = world.workspace.root / "choosing.jsonl"
    if not file.exists():
        with (world.workspace.root / "heldout.jsonl").open() as stream:
            file.write_text("".join(islice(stream, 300, 300 + NUM_CHOOSING)))
    folder = world.workspace.runs / f"choose-{label}"
    folder.mkdir(parents=True, exist_ok=True)
    request = EvaluateModel(
        **policy(model), name=label, data=file.name, n=NUM_CHOOSING, seed=world.seed, **ACTING
    )

    async def play() -> None:
        silent = KeptReporter()
        await evaluate_model(world.workspace, request, folder=folder, reporter=silent)

    anyio.run(play)
    data = (folder / "evaluation.json").read_bytes()
    return msgspec.json.decode(data, type=Evaluation).result.accuracy.value


def chosen_rate(world: DemoWorld, results: Results, name: str, arm: Arm) -> float:
    """Returns the learning rate that is best on the first seed's tasks for choosing."""
    if not arm.rates:
        return chosen_rate(
            world, results, *(next(iter(KINDS["main"].items())) if arm.settings is None else ("soft", KINDS["main"]["soft"]))
        )  # fmt: skip
    found = {}
    for rate in arm.rates:
        row = results.find(choosing=name, rate=rate)
        if row is None:
            stage = train(world, name, arm, rate, None)
            value = choosing_accuracy(world, f"{file_name(name)}-{rate:g}", stage.model)
            row = {"choosing": name, "rate": rate, "accuracy": value, "cpu_s": stage.cpu_s}
            results.add(row)
        found[rate] = row["accuracy"]
    return max(found, key=lambda rate: found[rate])


def measure(folder: Path, kinds: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    results, worlds = Results(folder), {}
    for seed in ALL:
        worlds[seed] = DemoWorld(folder, seed, num_heldout=300)
        # The project's own sft.yml may have soft targets; this one says nothing of a teacher.
        (worlds[seed].workspace.root / "hard.yml").write_text(
            "dataset_type: sft\ndata: {batch_size: 8}\nmodel: {path: demo/student, qlora_rank: 0}\n"
            "trainer: {num_epochs: 6}\n"
        )
    for name, arm in (pair for kind in kinds for pair in KINDS[kind].items()):
        for seed in arm.seeds:
            if results.find(arm=name, seed=seed):
                continue
            begun, world = time.process_time(), worlds[seed]
            rate = chosen_rate(worlds[1], results, name, arm)
            start = results.find(arm=arm.start, seed=seed)["model"] if arm.start else None
            stage = train(world, name, arm, rate, start)
            evaluation = world.evaluate(file_name(name), stage.model)
            result = evaluation.result
            results.add_and_print(
                {
                    "arm": name,
                    "seed": seed,
                    "rate": rate,
                    "accuracy": result.accuracy.value,
                    "teacher_kl": result.teacher_kl.value,
                    "token_forwards": stage.token_forwards,
                    "cpu_s": stage.cpu_s,
                    "spent_s": time.process_time() - begun,
                    "model": stage.model,
                    "solved": [int(task.success) for task in evaluation.tasks],
                }
            )


def summary(folder: Path) -> None:
    """Prints a table; differences are paired by task, with all seeds of both arms pooled."""
    results = Results(folder)
    arms = [row for row in results.rows if "arm" in row]
    by = {(row["arm"], row["seed"]): row for row in arms}
    print("| arm | rate | accuracy by seed | KL to the teacher | difference |")
    print("|---|---|---|---|---|")
    for name in dict.fromkeys(row["arm"] for row in arms):
        rows = [row for row in arms if row["arm"] == name]
        other = "hard → on-policy, 20" if "→" in name else "hard"
        if "epochs" in name:
            other = "hard, " + name.split(", ")[1]
        differences = [
            a - b
            for row in rows
            if (other, row["seed"]) in by
            for a, b in zip(row["solved"], by[other, row["seed"]]["solved"], strict=True)
        ]
        shown = ""
        if differences and name != other:
            d = mean_estimate(differences, limits=(-1.0, 1.0))
            shown = f"{d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}] over {other}"
        accuracies = " / ".join(f"{row['accuracy']:.3f}" for row in rows)
        kls = " / ".join(f"{row['teacher_kl']:.3f}" for row in rows)
        print(f"| {name} | {rows[0]['rate']:g} | {accuracies} | {kls} | {shown} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--summary", action="store_true")
    given = parser.parse_args()
    if given.summary:
        summary(given.folder)
    else:
        measure(given.folder, given.only)


if __name__ == "__main__":
    main()
