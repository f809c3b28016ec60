"""What each option of on-policy distillation gives on the demo world, one at a time.

    python benchmarks/on_policy/ablation.py FOLDER --seeds 1 2 3 --rows default jsd-0.5 …
    python benchmarks/on_policy/ablation.py FOLDER --table

Every row starts from the same SFT student of its seed (300 teacher rollouts), takes as many student
rollouts, and is evaluated on the same held-out tasks. Each result is a JSON line, also appended to
FOLDER/results.jsonl; what stands there is not done again, so the same command goes on. `--table`
prints accuracy, the paired difference from `default` with its 95 % interval over all seeds' tasks,
and the exact reverse KL on the student's own samples. `--row NAME section.key=value …` adds a row.
"""

import argparse
import time
from pathlib import Path

from demo_world import DemoWorld, Results

from stillroom.evaluate.intervals import mean_estimate, share_estimate

# An iteration has 64 rollouts in 8 steps, whatever the group size.
BASE = (
    "data.batch_size=64", "data.group_size=1", "algorithm.substeps=8",
    "algorithm.loss_fn=full_reverse_kl", "trainer.learning_rate=2e-3", "trainer.num_epochs=1000",
)  # fmt: skip
GROUP_4 = ("data.batch_size=16", "data.group_size=4")
GROUP_8 = ("data.batch_size=8", "data.group_size=8")
SAMPLED = ("algorithm.loss_fn=importance_sampling",)
# Of the learning rates tried with the sampled token's loss, the one with the lowest KL.
SAMPLED_FAIR = (*SAMPLED, "trainer.learning_rate=2.5e-4")
ROWS: dict[str, tuple[str, ...]] = {
    "default": (),
    "sampled, lr 2e-3": SAMPLED,
    "sampled, lr 1e-3": (*SAMPLED, "trainer.learning_rate=1e-3"),
    "sampled, lr 5e-4": (*SAMPLED, "trainer.learning_rate=5e-4"),
    "sampled, lr 2.5e-4": (*SAMPLED, "trainer.learning_rate=2.5e-4"),
    "sampled, lr 5e-4, 2 steps": (
        *SAMPLED, "trainer.learning_rate=5e-4", "algorithm.substeps=2",
    ),
    "sampled, baseline": (*SAMPLED_FAIR, "algorithm.kl_baseline=exact"),
    "sampled, beta 1": (*SAMPLED_FAIR, "algorithm.kl_penalty_coef=1"),
    "sampled, beta 0.01": (*SAMPLED_FAIR, "algorithm.kl_penalty_coef=0.01"),
    "sampled, correction": (*SAMPLED_FAIR, "algorithm.importance_cap=2"),
    "sampled, group 4": (*SAMPLED_FAIR, *GROUP_4),
    "ppo": ("algorithm.loss_fn=ppo", "trainer.learning_rate=2.5e-4"),
    "forward kl": ("algorithm.loss_fn=jsd", "algorithm.jsd_beta=0"),
    "jsd 0.1": ("algorithm.loss_fn=jsd", "algorithm.jsd_beta=0.1"),
    "jsd 0.5": ("algorithm.loss_fn=jsd", "algorithm.jsd_beta=0.5"),
    "jsd 0.9": ("algorithm.loss_fn=jsd", "algorithm.jsd_beta=0.9"),
    "top 1": ("algorithm.loss_fn=top_k_reverse_kl", "algorithm.top_k=1"),
    "top 4": ("algorithm.loss_fn=top_k_reverse_kl", "algorithm.top_k=4"),
    "top 16": ("algorithm.loss_fn=top_k_reverse_kl", "algorithm.top_k=16"),
    "top 64": ("algorithm.loss_fn=top_k_reverse_kl", "algorithm.top_k=64"),
    "group 4": GROUP_4,
    "group 8": GROUP_8,
    "special tokens masked": ("algorithm.mask_special_tokens=true",),
    "rewards, grpo": (*GROUP_4, "algorithm.reward_coef=0.1"),
    "rewards, gae": (*GROUP_4, "algorithm.reward_coef=0.1", "algorithm.adv_estimator=gae"),
    "rewards, reinforce": ("algorithm.reward_coef=0.1", "algorithm.adv_estimator=reinforce"),
    "1 step": ("algorithm.substeps=1",),
    "4 steps": ("algorithm.substeps=4",),
    "lr 1e-3": ("trainer.learning_rate=1e-3",),
    "lr 4e-3": ("trainer.learning_rate=4e-3",),
    "beginnings first": (
        "curriculum.prefix_tokens=30",
        "curriculum.prefix_tokens_end=120",
        "curriculum.prefix_steps=15",
    ),
    "few turns first": ("curriculum.first_turns=2", "curriculum.turn_steps=15"),
    "teacher's turns first": ("curriculum.teacher_share=0.5", "curriculum.teacher_steps=15"),
}  # fmt: skip


def measure(world: DemoWorld, row: str, overrides: tuple[str, ...], iterations: int) -> dict:
    """Trains and evaluates one row of one seed."""
    sft = world.train("sft", "sft.yml", [f"data.train_file={world.teacher_rows(300)}"])
    name = f"{row}-{iterations}".replace(" ", "-").replace(",", "")
    begun = time.monotonic()
    steps = [f"model.path={sft.model}", f"trainer.max_steps={iterations}", *BASE, *overrides]
    stage = world.train(name, "distill.yml", steps)
    found = world.evaluate(name, stage.model)
    return {
        "row": row,
        "seed": world.seed,
        "iterations": iterations,
        "accuracy": found.result.accuracy.value,
        "teacher_kl": found.result.teacher_kl.value,
        "solved": {task.task_id: int(task.success) for task in found.tasks},
        "cpu_s": stage.cpu_s,
        "wall_s": round(time.monotonic() - begun, 1),
        "token_forwards": stage.token_forwards,
        "overrides": list(overrides),
    }


def start(world: DemoWorld) -> dict:
    """Evaluates what every row of a seed starts from."""
    sft = world.train("sft", "sft.yml", [f"data.train_file={world.teacher_rows(300)}"])
    found = world.evaluate("sft", sft.model)
    return {
        "row": "start (SFT)",
        "seed": world.seed,
        "iterations": 0,
        "accuracy": found.result.accuracy.value,
        "teacher_kl": found.result.teacher_kl.value,
        "solved": {task.task_id: int(task.success) for task in found.tasks},
    }


def table(results: list[dict]) -> str:
    """Returns the rows as Markdown, each beside the default on the tasks of the same seeds."""
    by_row: dict[str, dict[int, dict]] = {}
    for result in results:
        by_row.setdefault(result["row"], {})[result["seed"]] = result
    lines = [
        "| option | seeds | accuracy | against the default | by seed | KL to the teacher |",
        "|---|---|---|---|---|---|",
    ]
    default = by_row["default"]
    for row, seeds in by_row.items():
        solved = [ok for result in seeds.values() for ok in result["solved"].values()]
        share = share_estimate(sum(solved), len(solved))
        shared = [seed for seed in seeds if seed in default]
        differences = [
            [ok - default[s]["solved"][task] for task, ok in seeds[s]["solved"].items()]
            for s in shared
        ]
        kl = " / ".join(f"{result['teacher_kl']:.3f}" for result in seeds.values())
        against = by_seed = "–"
        if row != "default" and shared:
            pooled = mean_estimate([d for one in differences for d in one], limits=(-1.0, 1.0))
            against = f"{pooled.value:+.3f} [{pooled.low:+.3f}, {pooled.high:+.3f}]"
            by_seed = " / ".join(f"{sum(one) / len(one):+.3f}" for one in differences)
        accuracy = f"{share.value:.3f} [{share.low:.3f}, {share.high:.3f}]"
        lines.append(f"| {row} | {len(seeds)} | {accuracy} | {against} | {by_seed} | {kl} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rows", nargs="+", default=list(ROWS))
    parser.add_argument("--row", nargs="+", action="append", default=[], metavar="NAME OVERRIDE")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--heldout", type=int, default=300)
    parser.add_argument("--table", action="store_true")
    requested = parser.parse_args()
    results = Results(requested.folder)
    if requested.table:
        print(table(results.rows))
        return
    added = {name: tuple(overrides) for name, *overrides in requested.row}
    rows = {**{name: ROWS[name] for name in requested.rows if name in ROWS}, **added}
    if unknown := set(requested.rows) - ROWS.keys():
        parser.error(f"unknown rows: {sorted(unknown)}; known: {list(ROWS)}")
    for seed in requested.seeds:
        world = DemoWorld(requested.folder, seed, num_heldout=requested.heldout)
        work = {"start (SFT)": lambda world=world: start(world)}
        for row, overrides in rows.items():
            work[row] = lambda world=world, row=row, overrides=overrides: measure(
                world, row, overrides, requested.iterations
            )
        for row, run in work.items():
            if not results.find(row=row, seed=seed):
                results.add_and_print(run())


if __name__ == "__main__":
    main()
