"""What a teacher that only gives text is best asked for, on the demo world.

    python benchmarks/any_teacher/text_teacher.py FOLDER --seeds 1 2 --arms plain@300 hard+own@300
    python benchmarks/any_teacher/text_teacher.py FOLDER --summary [--seeds 1 2]

Every arm begins at the same student: SFT on 300 teacher rollouts. It spends as many of the
teacher's output tokens as N plain rollouts take (`@N`; `@N$`: as much money, where an output token
costs five input tokens), and COMPUTE token-forwards of the student: sampling counts 1 a token,
training 3; a beginning that rows share passes once. Its rows are those of the cold start and its
own; the student is trained on them by `start_training`, in as many passes as the compute allows.
Arms:

    more      nothing: SFT goes on with the rows of the cold start
    own       nothing: the student's own right rollouts
    plain     the teacher answers fresh prompts
    hard      the teacher answers prompts that the student has just failed
    hard4     the same, of four rollouts at least two failed
    retry     the same, where the student also failed in three further tries
    diff      it takes over in the student's failed rollouts where it acts otherwise
    diff1     the same for one turn, and then the student goes on
    trained   the critic of trained_critic.py says where; a seed's folder has its critic.yml
    trained1  the same for one turn
    criticN   a critic that is right in N % of the rollouts says where it takes over, for one turn;
              right is the turn of `diff`, wrong any other turn; its reply takes 2 tokens
    X+own     X, and the student's own right rollouts, at most as many as all other rows
    X+owns    the same, only of prompts that the student has also failed

The order in which rows are trained moves a run by up to .06, so an arm is done in several
(`--orders`); a task counts with the share of orders that solve it, and intervals are over tasks.
One JSON line per arm and order; what is in FOLDER/results.jsonl is not done again.
"""

import argparse
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import anyio

sys.path.insert(0, str(Path(__file__).parents[1] / "on_policy"))
sys.path.append(str(Path(__file__).parents[2] / "tests"))

from demo_world import ACTING, DemoWorld, Results, policy, reported

from fakes.reporters import KeptReporter
from stillroom.api import GenerateRollouts
from stillroom.data.chat.render import ChatRenderer
from stillroom.data.formats import load_tasks
from stillroom.evaluate.intervals import mean_estimate
from stillroom.models.load import load_model
from stillroom.models.resolve import locate_model
from stillroom.rollout import context as rollout_context
from stillroom.rollout.refining import Critic, critic_messages
from stillroom.rollout.run import generate_rollouts
from stillroom.types import CallTotals, Usage

COMPUTE = 920_000
COLD, FRESH = 300, 1700
OUTPUT_PRICE = 5
"""What an output token costs in input tokens."""
CRITIC_TOKENS = 2
NUM_HELDOUT = 300
Row = dict[str, Any]


class Lab:
    """One seed's cold student and the rollouts that arms choose from."""

    def __init__(self, root: Path, seed: int) -> None:
        self.world = DemoWorld(root, seed, num_heldout=NUM_HELDOUT)
        self.folder = self.world.workspace.root
        self._tasks = load_tasks(self.folder / "prompts.jsonl")
        self.cold_rows = self._rows(self.world.teacher_rows(COLD))
        overrides = [
            f"data.train_file=sft-{COLD}.jsonl", f"model.path={self.world.models.student}",
            "trainer.num_epochs=6",
        ]  # fmt: skip
        self.cold = self.world.train("cold", "sft.yml", overrides)
        loaded = load_model(
            self.world.workspace, locate_model(self.world.workspace, self.world.models.student)
        )
        self._renderer = ChatRenderer(loaded.tokenizer)
        num_tokens = 6 * sum(map(self.num_tokens, self.cold_rows))
        self._passes = self.cold.token_forwards / num_tokens
        """What training a token takes: less than 3, as shared beginnings pass once."""
        self.student = self.rollouts(
            "student", input="prompts.jsonl", entries=f"{COLD}-{COLD + FRESH - 1}",
            **policy(self.cold.model),
        )  # fmt: skip
        self._shared = num_shared([row["tokens"]["ids"] for row in self.student])
        """Tokens with which every conversation begins: they pass once where they are sampled too."""

    def rollouts(self, name: str, **request: Any) -> list[Row]:
        """Returns the rollouts of a request, which are done once, in the order of the prompts."""
        output = f"pool-{name}.jsonl"
        if not (self.folder / f"{output}.manifest.json").exists():
            folder = self.world.workspace.runs / f"pool-{name}"
            folder.mkdir(parents=True, exist_ok=True)
            settings = ACTING | {"temperature": 1.0, "seed": self.world.seed, "output": output}
            requested = GenerateRollouts(**(settings | request))

            async def play() -> None:
                await generate_rollouts(
                    self.world.workspace, requested, folder=folder, reporter=KeptReporter()
                )

            anyio.run(play)
        # A file has rollouts in the order in which they ended: the short ones first.
        by_task: dict[str, list[Row]] = {}
        for row in sorted(self._rows(output), key=lambda row: row["sample"]):
            by_task.setdefault(row["task_id"], []).append(row)
        return [row for task in self._tasks for row in by_task.pop(task.task_id, [])]

    def _rows(self, name: str) -> list[Row]:
        lines = (self.folder / name).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def prompts_of(self, name: str, rollouts: Iterable[Row]) -> str:
        """Writes the prompts of these rollouts to a file, whose name is returned."""
        rows = (self.folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
        by_id = {task.task_id: row for task, row in zip(self._tasks, rows, strict=True)}
        lines = [by_id[rollout["task_id"]] + "\n" for rollout in rollouts]
        (self.folder / name).write_text("".join(lines), encoding="utf-8")
        return name

    def num_tokens(self, row: Row) -> int:
        """Returns how many tokens a row has when it is trained."""
        return sum(len(s.ids) for s in self._renderer.sequences(row["messages"], row["tools"]))

    def arm(self, name: str, order: int) -> Row:
        """Does one arm with its rows in one of several orders, and returns its result."""
        begun = time.process_time()
        kind, _, size = name.partition("@")
        base, _, own = kind.partition("+own")
        plain = self.rollouts(
            "plain", input="prompts.jsonl", entries=f"{COLD}-{COLD + 1299}",
            **policy(self.world.models.teacher),
        )  # fmt: skip
        spent_on = dollars if size.endswith("$") else output_tokens
        price = sum(map(spent_on, plain)) / len(plain)
        num_plain = int(size.strip("$") or 0)
        used, new, sampled = self._asked(base, plain, num_plain, price * num_plain, spent_on)
        num_own = 0
        if base == "own" or "+own" in kind:
            sampled = sampled or self.student
            mine = self._own(sampled, is_some=own == "s")
            mine = mine if base == "own" else mine[: len(self.cold_rows) + len(new)]
            num_own = len(mine)
            new += mine
        # A student that goes on reads the whole conversation anew.
        goes_on = (row for row in used if "student" in after_takeover(row))
        sampling = sum(len(row["tokens"]["ids"]) - self._shared for row in sampled)
        sampling += sum(self.num_tokens(row) - self._shared for row in goes_on)
        label = f"{name}-{order}" if order else name
        trained = self._train(label, [*self.cold_rows, *new], COMPUTE - sampling, order)
        found = self.world.evaluate(label, trained.model, has_kl=False)
        return {
            "arm": name,
            "seed": self.world.seed,
            "order": order,
            "accuracy": found.result.accuracy.value,
            "teacher_out": sum(map(output_tokens, used)),
            "teacher_in": sum(row["usage"]["prompt_tokens"] for row in used),
            "teacher_rollouts": len(used),
            "new_rows": len(new),
            "own_rows": num_own,
            "sampled": len(sampled),
            "compute": sampling + trained.token_forwards,
            "cpu_s": round(time.process_time() - begun, 1),
            "solved": {task.task_id: int(task.success) for task in found.tasks},
        }

    def _own(self, sampled: list[Row], *, is_some: bool) -> list[Row]:
        """Returns a right rollout of each prompt, in random order; `is_some`: of those alone that
        the student also failed."""
        failed = {row["task_id"] for row in sampled if not row["success"]}
        right = {row["task_id"]: row for row in sampled if is_good(row)}
        mine = [row for task, row in right.items() if task in failed or not is_some]
        random.Random(self.world.seed).shuffle(mine)
        return mine

    def _asked(
        self,
        base: str,
        plain: list[Row],
        num_plain: int,
        budget: float,
        spent_on: Callable[[Row], float],
    ) -> tuple[list[Row], list[Row], list[Row]]:
        """Returns the teacher's rollouts that the budget pays, the good ones among them, and the
        student's rollouts that had to be sampled for them."""
        if base in ("more", "own"):
            return [], [], []
        if base == "plain":
            used = paid(plain, budget, spent_on)
            return used, [row for row in used if is_good(row)], []
        student = self._tries(base)
        tries: dict[str, list[Row]] = {}
        for row in student:
            tries.setdefault(row["task_id"], []).append(row)
        most = 2 if base == "hard4" else 0
        failed = [
            rows[0] for rows in tries.values() if sum(bool(row["success"]) for row in rows) <= most
        ]
        if base in ("hard", "hard4", "retry"):
            # A hard prompt's answer is longer than a plain one's, so that the budget buys fewer.
            name = f"{base}-{num_plain}"
            answered = self.rollouts(
                name, input=self.prompts_of(f"{name}.jsonl", failed[:num_plain]),
                **policy(self.world.models.teacher),
            )  # fmt: skip
        else:
            answered = [self._charged(row) for row in self._refined(base, num_plain)]
        used = paid(answered, budget, spent_on)
        last = used[-1]["task_id"]
        until = max(n for n, row in enumerate(student) if row["task_id"] == last)
        return used, [row for row in used if is_good(row)], student[: until + 1]

    def _tries(self, base: str) -> list[Row]:
        """Returns the student's rollouts that an arm chooses from, in the order of sampling."""
        if base not in ("hard4", "retry"):
            return self.student
        several = self.rollouts(
            "student4", input="prompts.jsonl", entries=f"{COLD}-{COLD + 999}",
            samples_per_prompt=4, **policy(self.cold.model),
        )  # fmt: skip
        if base == "hard4":
            return several
        is_right = {row["task_id"]: row["success"] for row in several if row["sample"] == 0}
        return [row for row in several if row["sample"] == 0 or not is_right[row["task_id"]]]

    def _refined(self, base: str, num_plain: int) -> list[Row]:
        """Returns the student's failed rollouts as the teacher refined them.

        With a model as the critic these are as many as `num_plain` plain rollouts pay for.
        """
        request: Row = {
            "input": "prompts.jsonl",
            "refine": "pool-student.jsonl",
            "takeover": "first_difference",
            **policy(self.world.models.teacher),
        }
        if base == "diff":
            return self.rollouts("diff", **request)
        if base == "diff1":
            return self.rollouts("diff1", **request, turns="one")
        if base in ("trained", "trained1"):
            turns, n = ("one", 2.4) if base == "trained1" else ("rest", 1.6)
            asked = {"takeover": "critic", "critic": "critic.yml", "n": round(n * num_plain)}
            return self.rollouts(f"{base}-{num_plain}", **(request | asked), turns=turns)
        right = {row["task_id"]: row["refined"]["turn"] for row in self._refined("diff", 0)}
        critic = ScriptedCritic(right, int(base.removeprefix("critic")) / 100, self.world.seed)
        rollout_context.Critic = lambda _policy: critic
        try:
            return self.rollouts(base, **(request | {"takeover": "critic"}), turns="one")
        finally:
            rollout_context.Critic = Critic

    def _charged(self, row: Row) -> Row:
        """Returns a refined rollout with the tokens of the teacher and the critic alone as usage.

        A rollout's own usage counts the student's turns too.
        """
        usage = Counter[str]()
        for calls in (row["refined"]["critic"], row["refined"]["unused"]):
            usage.update(calls["usage"] if calls else {})
        authors = iter(row["refined"]["authors"])
        for index, message in enumerate(row["messages"]):
            if message["role"] != "assistant" or next(authors) != "teacher":
                continue
            [turn] = self._renderer.sequences(
                [*({**m, "weight": 0} for m in row["messages"][:index]), {**message, "weight": 1}],
                row["tools"],
            )
            usage["completion_tokens"] += sum(turn.trained)
            usage["prompt_tokens"] += len(turn.trained) - sum(turn.trained)
        return row | {"usage": dict(usage)}

    def _train(self, name: str, rows: list[Row], compute: float, order: int) -> Any:
        """Trains the cold student on as many passes over the rows as the compute allows."""
        seed = self.world.seed + 100 * order
        draws, lines, left = random.Random(seed), list[str](), compute / self._passes
        sizes = {id(row): self.num_tokens(row) for row in rows}
        while left > 0:
            for row in draws.sample(rows, len(rows)):
                left -= sizes[id(row)]
                if left <= 0:
                    break
                kept = {key: row[key] for key in ("messages", "tools")}
                lines.append(json.dumps(kept) + "\n")
        file = f"rows-{name}.jsonl"
        (self.folder / file).write_text("".join(lines), encoding="utf-8")
        overrides = [
            f"data.train_file={file}", f"model.path={self.cold.model}", "trainer.num_epochs=1",
            f"trainer.seed={seed}",
        ]  # fmt: skip
        return self.world.train(f"arm-{name}", "sft.yml", overrides)


class ScriptedCritic:
    """A critic that names the right turn in a share of the rollouts, and any other in the rest."""

    def __init__(self, right: dict[str, int | None], accuracy: float, seed: int) -> None:
        self._right, self._accuracy, self._seed = right, accuracy, seed

    async def first_wrong_turn(
        self, task: Any, turns: Any, recorder: Any, *, key: str
    ) -> tuple[int | None, CallTotals]:
        """Returns the turn that it names, and what its one call would have cost."""
        draws = random.Random(f"{self._seed}:{key}")
        right = self._right[task.task_id]
        others = [turn for turn in range(len(turns)) if turn != right]
        is_right = draws.random() < self._accuracy or not others
        # The demo's models read some four characters of such a question as a token.
        size = len(json.dumps(critic_messages(task, turns))) // 4
        usage = Usage(prompt_tokens=size, completion_tokens=CRITIC_TOKENS)
        return right if is_right else draws.choice(others), CallTotals(calls=1, usage=usage)


def num_shared(rows: list[list[int]]) -> int:
    """Returns how many tokens all rows begin with."""
    return next(n for n in itertools.count() if len({tuple(row[: n + 1]) for row in rows}) > 1)


def after_takeover(row: Row) -> list[str]:
    """Returns who wrote the turns after the teacher's first one."""
    refined = row.get("refined")
    if not refined or refined["turn"] is None:
        return []
    return refined["authors"][refined["turn"] + 1 :]


def output_tokens(row: Row) -> float:
    """Returns what a teacher's rollout costs, in output tokens."""
    return row["usage"]["completion_tokens"]


def dollars(row: Row) -> float:
    """Returns what a teacher's rollout costs, in the price of an input token."""
    return row["usage"]["prompt_tokens"] + OUTPUT_PRICE * row["usage"]["completion_tokens"]


def paid(rollouts: list[Row], budget: float, spent_on: Callable[[Row], float]) -> list[Row]:
    """Returns the first rollouts that the budget pays for."""
    used, left = list[Row](), budget
    for row in rollouts:
        if left <= 0:
            return used
        left -= spent_on(row)
        used.append(row)
    if left < 0.03 * budget:
        return used
    raise RuntimeError(f"the pool of {len(rollouts)} rollouts is too small for the budget")


def is_good(row: Row) -> bool:
    """Returns whether a rollout is kept to be trained on, as the cold start's were."""
    return row["reward"] == 1 and not row["tool_errors"] and row["stop_reason"] == "answered"


def solved(orders: list[Row]) -> list[float]:
    """Returns in how many of the training orders each task was solved, as a share."""
    return [
        sum(run["solved"][task] for run in orders) / len(orders) for task in orders[0]["solved"]
    ]


def summary(results: list[Row]) -> str:
    """Returns the table: each arm, and its paired difference from plain at the same budget."""
    by_arm: dict[str, dict[int, list[Row]]] = {}
    for result in results:
        by_arm.setdefault(result["arm"], {}).setdefault(result["seed"], []).append(result)
    lines = []
    for arm, seeds in sorted(by_arm.items(), key=lambda pair: pair[0].partition("@")[2]):
        _, _, size = arm.partition("@")
        rivals = by_arm.get(f"plain@{size.strip('$')}" if size else "more", {})
        differences = [
            ok - other
            for seed in sorted(seeds.keys() & rivals.keys())
            for ok, other in zip(solved(seeds[seed]), solved(rivals[seed]), strict=True)
        ]
        margin = mean_estimate(differences, limits=(-1.0, 1.0)) if differences else None
        whole = mean_estimate([ok for seed in seeds for ok in solved(seeds[seed])], limits=(0, 1))
        runs = [seeds[seed] for seed in sorted(seeds)]
        first = [orders[0] for orders in runs]
        lines.append(
            reported(
                arm=arm,
                by_order=[[round(run["accuracy"], 3) for run in orders] for orders in runs],
                accuracy=[round(whole.value, 3), round(whole.low, 3), round(whole.high, 3)],
                above=margin and [round(x, 3) for x in (margin.value, margin.low, margin.high)],
                teacher_out=[run["teacher_out"] for run in first],
                teacher_in=[run["teacher_in"] for run in first],
                new_rows=[run["new_rows"] for run in first],
                compute=[run["compute"] for run in first],
            )
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--arms", nargs="+", default=[])
    parser.add_argument("--orders", type=int, default=1)
    parser.add_argument("--summary", action="store_true")
    options = parser.parse_args()
    results = Results(options.folder)
    if options.summary:
        print(summary([row for row in results.rows if row["seed"] in options.seeds]))
        return
    for seed in options.seeds:
        lab = Lab(options.folder.resolve(), seed)
        for order, arm in itertools.product(range(options.orders), options.arms):
            if not results.find(arm=arm, order=order, seed=seed):
                results.add_and_print(lab.arm(arm, order))


if __name__ == "__main__":
    main()
