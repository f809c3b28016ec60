"""On-policy distillation after SFT beside more SFT, at the same compute of the student.

    python benchmarks/on_policy/margin.py FOLDER --seeds 1 2 3
    python benchmarks/on_policy/margin.py FOLDER --summary
    python benchmarks/on_policy/margin.py FOLDER --kinds scarce --student MODEL --teacher MODEL

Scarce: 300 teacher rollouts, filtered, and six epochs of SFT; from there on-policy distillation on
prompts alone, or SFT continued on the same rows. Long: the same for twice as long. Early: the same with 2,000 rollouts, and as many
steps of SFT first. Plentiful: 2,000 rollouts, and SFT until it hardly learns any more; from there
either. The compute is what `demo_world.py` counts: tokens through the student's
layers, once where they are sampled or read, three times where a gradient is taken; on-policy pays
for its own sampling. SFT goes on for as many whole epochs as reach on-policy's compute (rounded up,
in its favour), once from the SFT student (`continued`) and once from the base in one schedule
(`from base`). One JSON line per model; what is in FOLDER/results.jsonl is not done again.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from demo_world import DemoWorld, Models, Results, Stage, reported

from stillroom.evaluate.intervals import mean_estimate


@dataclass(frozen=True)
class Kind:
    """How much of the teacher there is, and how long SFT and on-policy distillation go on."""

    num_rollouts: int
    sft_epochs: int
    iterations: int


KINDS = {
    "scarce": Kind(300, 6, 80),
    "long": Kind(300, 6, 160),
    "early": Kind(2000, 1, 80),
    "plentiful": Kind(2000, 8, 40),
}


def sft(world: DemoWorld, name: str, num_rollouts: int, start: str, epochs: int) -> Stage:
    rows = world.teacher_rows(num_rollouts)
    overrides = [
        f"data.train_file={rows}", f"model.path={start}", f"trainer.num_epochs={epochs}",
    ]  # fmt: skip
    return world.train(name, "sft.yml", overrides)


def stages(world: DemoWorld, kind: str) -> dict[str, Stage]:
    """Trains what is compared for one seed."""
    num_rollouts, epochs = KINDS[kind].num_rollouts, KINDS[kind].sft_epochs
    first = sft(world, f"sft-{kind}", num_rollouts, world.models.student, epochs)
    overrides = [
        f"model.path={first.model}", f"trainer.max_steps={KINDS[kind].iterations}", "trainer.num_epochs=1000",
        f"teacher.path={world.models.teacher}",
    ]  # fmt: skip
    ours = world.train(f"on-policy-{kind}", "distill.yml", overrides)
    an_epoch = first.token_forwards / epochs
    more = math.ceil(ours.token_forwards / an_epoch)
    continued = sft(world, f"continued-{kind}-{more}", num_rollouts, first.model, more)
    whole = epochs + more
    from_base = sft(world, f"from-base-{kind}-{whole}", num_rollouts, world.models.student, whole)
    return {"SFT": first, "on-policy": ours, "continued": continued, "from base": from_base}


def measure(world: DemoWorld, kind: str) -> list[dict]:
    """Returns the results of one seed, the teacher's and the base student's where it is scarce."""
    models: dict[str, tuple[str, Stage | None]] = {}
    if kind in ("scarce", "long"):
        models |= {
            "teacher": (world.models.teacher, None), "base": (world.models.student, None),
        }  # fmt: skip
    models |= {n: (s.model, s) for n, s in stages(world, kind).items()}
    results = []
    for name, (model, stage) in models.items():
        is_teacher = name == "teacher"
        label = f"{name}-{kind}".replace(" ", "-")
        found = world.evaluate(label, model, has_kl=not is_teacher)
        kl = None if found.result.teacher_kl is None else found.result.teacher_kl.value
        results.append(
            {
                "kind": kind,
                "seed": world.seed,
                "model": name,
                "accuracy": found.result.accuracy.value,
                "teacher_kl": kl,
                "token_forwards": stage.token_forwards if stage else 0,
                "steps": stage.steps if stage else 0,
                "cpu_s": stage.cpu_s if stage else 0.0,
                "solved": {task.task_id: int(task.success) for task in found.tasks},
            }
        )
    return results


def spent(model: str, result: dict, first: dict) -> int:
    """Returns the student's compute from the base on: all but `from base` begin with SFT."""
    return result["token_forwards"] + (0 if model == "from base" else first["token_forwards"])


def summary(results: list[dict]) -> str:
    """Returns what the claims say of the results, as JSON lines."""
    lines = []
    for kind in dict.fromkeys(result["kind"] for result in results):
        by_model: dict[str, list[dict]] = {}
        for result in results:
            if result["kind"] == kind:
                by_model.setdefault(result["model"], []).append(result)
        ours, before = by_model["on-policy"], by_model["SFT"]
        for rival in ("continued", "from base"):
            pairs = list(zip(ours, by_model[rival], strict=True))
            differences = [
                ok - them["solved"][task] for us, them in pairs for task, ok in us["solved"].items()
            ]
            margin = mean_estimate(differences, limits=(-1.0, 1.0))
            lines.append(
                reported(
                    kind=kind,
                    rival=f"SFT {rival}",
                    seeds=len(pairs),
                    margin=margin.value,
                    low=margin.low,
                    high=margin.high,
                    by_seed=[round(us["accuracy"] - them["accuracy"], 3) for us, them in pairs],
                    compute_ratio=[
                        round(spent(rival, them, first) / spent("on-policy", us, first), 3)
                        for (us, them), first in zip(pairs, before, strict=True)
                    ],
                )
            )
        teachers = [r["accuracy"] for r in results if r["model"] == "teacher"]
        shares = [us["accuracy"] / t for us, t in zip(ours, teachers, strict=False)]
        falls = [b["teacher_kl"] / us["teacher_kl"] for us, b in zip(ours, before, strict=True)]
        lines.append(
            reported(
                kind=kind,
                accuracy={m: [round(r["accuracy"], 3) for r in rs] for m, rs in by_model.items()},
                teacher_kl={
                    m: [round(r["teacher_kl"], 4) for r in rs]
                    for m, rs in by_model.items()
                    if m != "teacher"
                },
                of_the_teacher=[round(share, 3) for share in shares],
                kl_falls=[round(fall, 2) for fall in falls],
            )
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--kinds", nargs="+", default=["scarce", "early", "plentiful"])
    parser.add_argument("--heldout", type=int, default=300)
    parser.add_argument("--student", default=Models.student)
    parser.add_argument("--teacher", default=Models.teacher)
    parser.add_argument("--summary", action="store_true")
    requested = parser.parse_args()
    results = Results(requested.folder)
    if requested.summary:
        print(summary(results.rows))
        return
    for kind in requested.kinds:
        for seed in requested.seeds:
            if results.find(kind=kind, seed=seed):
                continue
            models = Models(requested.student, requested.teacher)
            world = DemoWorld(requested.folder, seed, num_heldout=requested.heldout, models=models)
            results.add_and_print(*measure(world, kind))


if __name__ == "__main__":
    main()
