"""The text and the picture of docs/results.md, from the figures of results.py."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from methods import METHODS, ON_POLICY_RATE, RATE
from plot import plot
from tasks import TASKS

from stillroom.evaluate.intervals import (
    Estimate,
    accuracy_estimate,
    excludes_zero,
    mean_estimate,
    smallest_difference,
)

CONTROL = "SFT, then more SFT"
PICTURED = "tickets"
COMMONEST = "always the commonest answer"
BASELINES = ("teacher", COMMONEST, "base", "base, 5 examples")
ABOUT = {
    "tickets": (
        "A support ticket becomes one line, `queue=returns urgency=low order=B7791`: six queues, three urgencies, an "
        "order number to copy. The answer counts if the line is exact."
    ),
    "office": (
        "A request such as *Send Mara a note with the weather in Graz on Friday* is carried out with seven tools over "
        "three or four turns; the answer, which holds numbers that only the tools know, counts if it is exact."
    ),
    "returns": (
        "Whether goods are taken back is decided by a policy of six rules. The teacher and the base model read the policy in "
        "their prompt, students never do: it moves into the weights."
    ),
}
HEAD = """# Results on a real model

SmolLM2-135M-Instruct as student, on two CPU cores. `make real` runs all of it and writes this page; scripts, grammars and
figures are in `benchmarks/real/`.

- **The same for each method**: {rows} answers of the teacher and {minutes:g} minutes of training. Methods that start from an SFT model spend half of
  the minutes on that.
- **The teacher** of a task is SmolLM2-135M too, trained on 800 gold conversations of all forms. Students see nothing but what it says.
- **Held-out tasks** are {heldout} with sentence forms of the training set and new fillings, and {heldout} with *new* sentence forms, of which the training set has
  none. They show how far a score on the training forms carries.
- All weights are trained, at {rate:g} ({on_policy:g} on-policy), batches of 8 (32 prompts on-policy). Answers are greedy, and right only if they are
  exact. Intervals are 95 %.
- **Smaller differences are not shown**: with {heldout} tasks a seed, about {points}.
"""
ONE_SEED = """- **One seed so far** of {tasks}: another seed of the same method may differ by more than its interval says, which is of tasks alone.
"""
IMAGE = (
    "![Accuracy of each method on tickets: forms of training, and new forms](images/results.svg)\n"
)
WHAT_IT_SAYS = """
## Conclusions

{verdicts}

## Configs to copy

```yaml
# SFT on tokens
dataset_type: sft
data: {{train_file: sft.jsonl, batch_size: 8}}
model: {{path: SmolLM2-135M-Instruct.Q4_1.gguf, qlora_rank: 0}}
trainer: {{num_epochs: 1000, learning_rate: 2.0e-4, schedule: constant, max_minutes: {minutes:g}}}
```

```yaml
# SFT on soft targets
dataset_type: sft
data: {{train_file: sft.jsonl, batch_size: 8}}
model: {{path: SmolLM2-135M-Instruct.Q4_1.gguf, qlora_rank: 0}}
teacher: {{path: teacher}}
soft_targets: {{temperature: 4, top_k: 64}}
trainer: {{num_epochs: 1000, learning_rate: 2.0e-4, schedule: constant, max_minutes: {minutes:g}}}
```

The other methods start from an SFT run: `path` is its run id (here sft-1). *More SFT* repeats the first config with it. *Refine* does so with the rows of
[refined rollouts](../skills/off-policy-distillation/references/refine.md).

```yaml
# DPO
dataset_type: dpo
data: {{train_file: pairs.jsonl, batch_size: 8}}
dpo: {{nll_coef: 0.2}}
model: {{path: sft-1, qlora_rank: 0}}
trainer: {{num_epochs: 1000, learning_rate: 1.0e-5, schedule: constant, max_minutes: {half:g}}}
```

```yaml
# on-policy
dataset_type: distill
data: {{train_file: prompts.jsonl, batch_size: 32}}
model: {{path: sft-1, qlora_rank: 0}}
teacher: {{path: teacher}}
rollout: {{max_tokens: 40, max_turns: 1, concurrency: 32}}
algorithm: {{substeps: 2}}
trainer: {{num_epochs: 1000, learning_rate: 5.0e-5, schedule: constant, max_minutes: {half:g}}}
```
"""

Figure = dict[str, Any]


def page(rows: Sequence[Figure]) -> str:
    """Returns the page with the figures."""
    trained = [row for row in rows if "minutes" in row]
    if not trained:
        raise SystemExit("error: no method was measured, so there is no page to write")
    heldout = len(trained[0]["new"])
    num_seeds = {
        name: len({row["seed"] for row in trained if row["task"] == name})
        for name in TASKS
        if any(row["task"] == name for row in trained)
    }
    points = [
        f"{100 * smallest_difference(heldout * num):.0f} points at {num} seed{'s' * (num > 1)}"
        for num in sorted(set(num_seeds.values()))
    ]
    minutes = trained[0]["minutes"]
    head = HEAD.format(
        rows=trained[0]["teacher_rows"], minutes=minutes, heldout=heldout, rate=RATE,
        on_policy=ON_POLICY_RATE, points=" and ".join(points),
    )  # fmt: skip
    once = [name.capitalize() for name, num in num_seeds.items() if num == 1]
    parts = [head, ONE_SEED.format(tasks=", ".join(once)) if once else ""]
    verdicts: list[str] = []
    for name in TASKS:
        own = [row for row in rows if row["task"] == name]
        if own:
            parts.append(_section(name, own))
            verdicts += _verdicts(name, own)
    said = "\n".join(f"- {line}" for line in verdicts) or "- Nothing yet: no control was measured."
    parts.append(WHAT_IT_SAYS.format(verdicts=said, minutes=minutes, half=minutes / 2))
    return "".join(parts)


def picture(rows: Sequence[Figure]) -> str:
    """Returns the SVG with the accuracies of the tickets, which README shows first."""
    own = [row for row in rows if row["task"] == PICTURED and row["method"] != COMMONEST]
    methods = [name for name in (*BASELINES, *METHODS) if any(row["method"] == name for row in own)]
    num_new = sum(len(row["new"]) for row in own if row["method"] == methods[0])
    return plot(
        "A SmolLM2-135M learns to route tickets: answers exactly right",
        f"Filled: {num_new} tickets in sentence forms that the student has never seen, with 95 % intervals. "
        "Outlined: the forms of its training set.",
        {
            name: (_estimate(of, "seen"), _estimate(of, "new"))
            for name in methods
            for of in [[row for row in own if row["method"] == name]]
        },
    )


def _section(name: str, rows: Sequence[Figure]) -> str:
    seeds = sorted({row["seed"] for row in rows})
    days = sorted({row["date"] for row in rows})
    commits = sorted({row["commit"] for row in rows})
    lines = [
        f"\n## {name.capitalize()}",
        f"\n{ABOUT[name]}\n",
        *([IMAGE] if name == PICTURED else []),
        f"| | forms of training | new forms | new forms, points above *{CONTROL}* | training |",
        "|---|---|---|---|---|",
    ]
    for method in (*BASELINES, *METHODS):
        own = [row for row in rows if row["method"] == method]
        if not own:
            continue
        seconds = [row["seconds"] for row in own if "seconds" in row]
        spent = f"{fmean(seconds):.0f} s" if seconds else ""
        if steps := [row["steps"] for row in own if "steps" in row]:
            spent += f", {fmean(steps):.0f} steps"
        cells = [_accuracy(own, "seen"), _accuracy(own, "new"), _gap(rows, method), spent]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    lines.append(
        f"\nSeeds {', '.join(map(str, seeds))}; measured {' to '.join(dict.fromkeys((days[0], days[-1])))} at "
        f"{', '.join(commits)}. Seconds are those of the last training with loading; of methods from an SFT model, without it.\n"
    )
    return "\n".join(lines)


def _estimate(rows: Sequence[Figure], forms: str) -> Estimate:
    return accuracy_estimate([float(digit) for row in rows for digit in row[forms]])


def _accuracy(rows: Sequence[Figure], forms: str) -> str:
    estimate = _estimate(rows, forms)
    return f"{estimate.value:.1%} [{estimate.low:.1%}, {estimate.high:.1%}]"


def _differences(rows: Sequence[Figure], method: str) -> list[float]:
    """Returns, for each seed and task with new forms, the method's accuracy minus the control's."""
    of = {(row["method"], row["seed"]): row["new"] for row in rows}
    return [
        float(own) - float(control)
        for (name, seed), digits in of.items()
        if name == method and (CONTROL, seed) in of
        for own, control in zip(digits, of[CONTROL, seed], strict=True)
    ]


def _gap(rows: Sequence[Figure], method: str) -> str:
    gaps = _differences(rows, method)
    if method == CONTROL or method in BASELINES or not gaps:
        return ""
    estimate = mean_estimate(gaps, limits=(-1, 1))
    text = f"{100 * estimate.value:+.1f} [{100 * estimate.low:+.1f}, {100 * estimate.high:+.1f}]"
    return f"**{text}**" if _is_clear(estimate) else text


def _is_clear(gap: Estimate) -> bool:
    """Whether a gap's interval excludes 0 as it is printed, in tenths of a point."""
    printed = [round(100 * (bound or 0), 1) for bound in (gap.low, gap.high)]
    return excludes_zero(gap) and 0 not in printed


def _is_commonest(rows: Sequence[Figure], method: str) -> bool:
    """Returns whether a method solves just the tasks that the commonest answer solves."""
    of = {(row["method"], row["seed"]): (row["seen"], row["new"]) for row in rows}
    seeds = [seed for name, seed in of if name == method]
    return bool(seeds) and all(of[method, seed] == of.get((COMMONEST, seed)) for seed in seeds)


def _verdicts(name: str, rows: Sequence[Figure]) -> list[str]:
    """Returns which methods are better or worse than the control on new forms, in a sentence."""
    better: list[str] = []
    worse: list[str] = []
    same: list[str] = []
    for method in METHODS:
        gaps = _differences(rows, method)
        if method == CONTROL or not gaps:
            continue
        estimate = mean_estimate(gaps, limits=(-1, 1))
        (same if not _is_clear(estimate) else better if estimate.value > 0 else worse).append(
            method
        )
    parts = [
        f"{word} than *{CONTROL}*: {'; '.join(methods)}"
        for word, methods in (("better", better), ("worse", worse))
        if methods
    ]
    if same:
        parts.append(f"no difference shown: {'; '.join(same)}")
    if idle := [method for method in METHODS if _is_commonest(rows, method)]:
        parts.append(f"gave the commonest answer to every task: {'; '.join(idle)}")
    said = ". ".join(part[0].upper() + part[1:] for part in parts)
    return [f"**{name.capitalize()}**, new forms. {said}."] if parts else []
