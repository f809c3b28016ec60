"""On-policy distillation from a teacher with another tokenizer and template, beside more SFT.

    python benchmarks/any_teacher/other_tokenizer.py FOLDER --seeds 1 2
    python benchmarks/any_teacher/other_tokenizer.py FOLDER --summary

`demo/other-student` has no token ids in common with `demo/teacher`. Each seed: SFT on 300 teacher
rollouts; from there the byte chain (teacher.tokens: reread), 80 iterations of 32 rollouts, or SFT
continued for as many whole epochs as reach that compute of the student (rounded up, in its favour).
For comparison the same with `demo/student`, whose tokens the teacher shares. One JSON line per
model; what is in FOLDER/results.jsonl is not done again.
"""

import argparse
import math
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "on_policy"))

from demo_world import DemoWorld, Models, Results, Stage, reported

from stillroom.evaluate.intervals import mean_estimate, share_estimate

ROLLOUTS, SFT_EPOCHS = 300, 6
ON_POLICY = (
    "data.batch_size=32", "data.group_size=1", "algorithm.substeps=4", "trainer.num_epochs=1000",
    "trainer.max_steps=80", "trainer.learning_rate=2e-3",
)  # fmt: skip
ARMS = ("SFT", "same tokenizer", "byte chain", "continued")
MIN_GAP, MAX_BEHIND = 0.08, 0.05


def sft(world: DemoWorld, name: str, start: str, epochs: int) -> Stage:
    rows = world.teacher_rows(ROLLOUTS)
    overrides = [
        f"data.train_file={rows}", f"model.path={start}", f"trainer.num_epochs={epochs}",
    ]  # fmt: skip
    return world.train(name, "sft.yml", overrides)


def distilled(world: DemoWorld, name: str, start: str, *overrides: str) -> Stage:
    given = [f"model.path={start}", *ON_POLICY, *overrides]
    return world.train(name, "distill.yml", given)


def stage(world: DemoWorld, arm: str) -> Stage:
    """Trains what an arm needs, as far as it is not done."""
    first = sft(world, "sft-other", "demo/other-student", SFT_EPOCHS)
    if arm == "SFT":
        return first
    if arm == "same tokenizer":
        same = sft(world, "sft-same", "demo/student", SFT_EPOCHS)
        return distilled(world, "on-policy-same", same.model)
    ours = distilled(
        world, "byte-chain", first.model, "teacher.tokens=reread", "algorithm.loss_fn=auto"
    )
    if arm == "byte chain":
        return ours
    more = math.ceil(ours.token_forwards * SFT_EPOCHS / first.token_forwards)
    return sft(world, f"continued-other-{more}", first.model, more)


def measure(world: DemoWorld, arm: str) -> dict:
    done = stage(world, arm)
    found = world.evaluate(arm.replace(" ", "-"), done.model, has_kl=arm == "same tokenizer")
    shown = ("byte_share", "not_compared", "teacher_tokens", "teacher_kl", "one_to_one")
    return {
        "arm": arm,
        "seed": world.seed,
        "accuracy": found.result.accuracy.value,
        "token_forwards": done.token_forwards,
        "cpu_s": done.cpu_s,
        "first": {name: done.first[name] for name in shown if name in done.first},
        "last": {name: done.last[name] for name in shown if name in done.last},
        "solved": {task.task_id: int(task.success) for task in found.tasks},
    }


def summary(results: list[dict]) -> str:
    """Returns each arm's accuracy, and the byte chain beside the others, as JSON lines."""
    by_arm: dict[str, dict[int, dict]] = {}
    for result in results:
        by_arm.setdefault(result["arm"], {})[result["seed"]] = result
    lines = []
    for arm, seeds in by_arm.items():
        solved = [ok for result in seeds.values() for ok in result["solved"].values()]
        share = share_estimate(sum(solved), len(solved))
        by_seed = {seed: round(result["accuracy"], 3) for seed, result in sorted(seeds.items())}
        lines.append(
            reported(arm=arm, by_seed=by_seed, value=share.value, low=share.low, high=share.high)
        )
    ours = by_arm.get("byte chain", {})
    for rival in ("continued", "SFT", "same tokenizer"):
        shared = sorted(ours.keys() & by_arm.get(rival, {}).keys())
        if not shared:
            continue
        gaps = [
            ok - by_arm[rival][seed]["solved"][task]
            for seed in shared
            for task, ok in ours[seed]["solved"].items()
        ]
        gap = mean_estimate(gaps, limits=(-1.0, 1.0))
        gates = {
            "continued": gap.value >= MIN_GAP and gap.low > 0,
            "SFT": gap.low > 0,
            "same tokenizer": gap.value >= -MAX_BEHIND,
        }
        lines.append(
            reported(
                byte_chain_over=rival, seeds=shared, value=gap.value, low=gap.low, high=gap.high,
                passes=gates[rival],
            )
        )  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--heldout", type=int, default=300)
    parser.add_argument("--summary", action="store_true")
    given = parser.parse_args()
    results = Results(given.folder)
    if given.summary:
        print(summary(results.rows))
        return
    for seed in given.seeds:
        world = DemoWorld(
            given.folder, seed, num_heldout=given.heldout, models=Models("demo/other-student")
        )
        for arm in given.arms:
            if not results.find(arm=arm, seed=seed):
                results.add_and_print(measure(world, arm))


if __name__ == "__main__":
    main()
