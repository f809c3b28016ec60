"""A rule moves from the system prompt into the weights: prompt distillation on the demo world.

    python benchmarks/any_teacher/prompt_distillation.py --work FOLDER [--seeds 1,2] [--arms …]

The clerk of `ruled_clerk.py` obeys `A fee of 7 coins is added to every answer.` as long as it reads
it. It is its own teacher: the teacher reads the rule, the student does not. Prints a JSON line for
each arm and seed; what is done is not done again. One thread.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "on_policy"))
sys.path.append(str(Path(__file__).parents[2] / "tests"))

import anyio
from demo_world import ACTING, DemoWorld, Models, policy, reported
from ruled_clerk import make_model, rule, with_fee

from fakes.reporters import KeptReporter
from stillroom.api import (
    ConvertRollouts,
    FilterDataset,
    GenerateRollouts,
    convert_rollouts,
    filter_dataset,
)
from stillroom.demo.world import SYSTEM, heldout_tasks, task_row, training_tasks
from stillroom.models.resolve import locate_model
from stillroom.rollout.run import generate_rollouts
from stillroom.settings import Workspace

FEE, NUM_PROMPTS, NUM_HELDOUT = 7, 320, 300
RULE = rule(FEE)
CONFIG = """\
dataset_type: distill
data: {train_file: prompts.jsonl, batch_size: 16, group_size: 2}
model: {path: clerk, qlora_rank: 0, precision: fp32}
teacher: {path: clerk, precision: fp32, system: "RULE"}
rollout: {max_turns: 5, max_tokens: 48, concurrency: 64}
trainer: {num_epochs: 100, max_steps: 40, learning_rate: 1e-3}
"""
SFT = """\
dataset_type: sft
data: {train_file: sft.jsonl, batch_size: 16}
model: {path: clerk, qlora_rank: 0, precision: fp32}
trainer: {num_epochs: 6, learning_rate: 1e-3}
"""
SOFT = f"""\
{SFT}teacher: {{path: clerk, precision: fp32, system: "RULE"}}
soft_targets: {{temperature: 4.0}}
"""
HELDOUT = "heldout.jsonl"


def clerk(root: Path) -> Path:
    """Returns the folder of the clerk that obeys rules, which is made if it is not there."""
    folder = root / "clerk"
    if not (folder / "model.safetensors").exists():
        start = Path(locate_model(Workspace(root), "demo/teacher").location)
        make_model(start, folder, seed=11)
    return folder


class RuledWorld(DemoWorld):
    """The demo world whose answers include a fee; the prompts do not say so."""

    def __init__(self, root: Path, seed: int) -> None:
        model = str(clerk(root))
        super().__init__(root, seed, num_heldout=NUM_HELDOUT, models=Models(model, model))
        folder = self.workspace.root
        configs = {"config.yml": CONFIG, "sft.yml": SFT, "soft.yml": SOFT}
        for name, text in configs.items():
            written = text.replace("clerk", model).replace("RULE", RULE)
            (folder / name).write_text(written, encoding="utf-8")
        for name, tasks in (
            ("prompts.jsonl", training_tasks(NUM_PROMPTS, seed=seed)),
            (HELDOUT, heldout_tasks(NUM_HELDOUT, seed=seed + 100)),
        ):
            rows = [json.dumps(task_row(with_fee(task, FEE))) for task in tasks]
            (folder / name).write_text("\n".join(rows) + "\n", encoding="utf-8")

    def measure(self, name: str, model: str, *, has_rule: bool) -> str:
        """Returns the share of held-out tasks that a model solves, as a JSON line."""
        system = RULE if has_rule else None
        result = self.evaluate(name, model, has_kl=False, system=system).result
        accuracy = result.accuracy
        return reported(
            arm=name,
            seed=self.seed,
            accuracy=accuracy.value,
            low=accuracy.low,
            high=accuracy.high,
            n=accuracy.n,
        )

    def off_policy_rows(self) -> str:
        """Returns the file of what the clerk does with the rule, as rows without the rule."""
        rows, sft = "rollouts.jsonl", "sft.jsonl"
        if not (self.workspace.root / sft).exists():
            folder, silent = self._folder("rollouts"), KeptReporter()
            request = GenerateRollouts(
                input="prompts.jsonl",
                output=rows,
                system=RULE,
                **policy(self.models.teacher),
                temperature=1.0,
                seed=self.seed,
                **ACTING,
            )

            async def play() -> None:
                await generate_rollouts(self.workspace, request, folder=folder, reporter=silent)

            anyio.run(play)
            filter_dataset(
                self.workspace, FilterDataset(input=rows, output="good.jsonl", min_reward=1)
            )
            convert_rollouts(
                self.workspace, ConvertRollouts(input="good.jsonl", output=sft, system=SYSTEM)
            )
        return sft


def run_seed(root: Path, seed: int) -> Iterator[str]:
    """Yields the results of one seed, one line for each arm."""
    world = RuledWorld(root, seed)
    model = world.models.student
    yield world.measure("base, without the rule", model, has_rule=False)
    yield world.measure("base, with the rule", model, has_rule=True)
    stage = world.train("on-policy", "config.yml", [])
    yield reported(arm="on-policy", seed=seed, cpu_s=stage.cpu_s, last=stage.last["teacher_kl"])
    yield world.measure("on-policy, without the rule", stage.model, has_rule=False)
    yield world.measure("on-policy, with the rule", stage.model, has_rule=True)
    world.off_policy_rows()
    for arm, config in (("off-policy", "sft.yml"), ("off-policy, soft targets", "soft.yml")):
        stage = world.train(arm, config, [])
        yield reported(arm=arm, seed=seed, cpu_s=stage.cpu_s)
        yield world.measure(f"{arm}, without the rule", stage.model, has_rule=False)
        yield world.measure(f"{arm}, with the rule", stage.model, has_rule=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="where models and runs are kept")
    parser.add_argument("--seeds", default="1,2")
    chosen = parser.parse_args()
    chosen.work.mkdir(parents=True, exist_ok=True)
    for seed in map(int, chosen.seeds.split(",")):
        for line in run_seed(chosen.work.resolve(), seed):
            print(line, flush=True)


if __name__ == "__main__":
    main()
