"""Trains a small critic of the shop clerk's failed rollouts, and measures how often it is right.

    python benchmarks/any_teacher/trained_critic.py FOLDER [--student MODEL] [--check SEED]

The critic is the demo's teacher, trained further: it reads what `refine` asks a critic, and answers
with the number of the first wrong turn. Its examples are failed rollouts of a student for tasks
whose right plan is known: wrong first is the turn that leaves the plan first. FOLDER/critic
then holds the model and FOLDER/critic.yml names it. Its chat template leaves out the instruction,
which it always follows, and writes the rollout as the clerk's own turns.

`--check` compares it with the turns at which `where: first_difference` took over in the rollouts of
another student: those of a seed's folder that `text_teacher.py` wrote.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "on_policy"))
sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import anyio
import torch
from demo_world import ACTING, policy, reported
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from demo_models.curriculum import TrainingExample
from demo_models.pretrain import fit, shuffled_batches
from stillroom.api import CreateProject, GenerateRollouts, create_project
from stillroom.data.formats import Task, load_tasks
from stillroom.demo.world import ShopTask, task_row, training_tasks
from stillroom.models.resolve import locate_model
from stillroom.reporting import SilentReporter
from stillroom.rollout.journal.records import RolloutKey
from stillroom.rollout.refine.critic import critic_messages, read_turn_number
from stillroom.rollout.run import generate_rollouts
from stillroom.rollout.students import FailedRollouts, RecordedRollout
from stillroom.settings import Workspace
from stillroom.types import Message

NUM_TASKS, NUM_CHECKED, SEED = 4000, 400, 7100
NUM_STEPS, BATCH_SIZE, PEAK_LEARNING_RATE = 1500, 16, 2e-3
PROMPTS, ROLLOUTS = "tasks.jsonl", "rollouts.jsonl"
TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- set tag = message.content[5:22] %}
{%- set shown = namespace(text=message.content | replace(tag ~ '>', '>')
    | replace('\\nWhich turn is wrong first?', '\\n')
    | replace('<task>\\n[system] ', '<|im_start|>system\\n')
    | replace('\\n[user] ', '<|im_end|>\\n<|im_start|>user\\n')
    | replace('\\n</task>\\n<expected_answer>\\n', '\\n')
    | replace('\\n</expected_answer>\\n', '<|im_end|>\\n')
    | replace('}\\n[tool] ', '}}\\n</tool_call><|im_end|>\\n<|im_start|>tool\\n<tool_response>\\n')
    | replace('[assistant] ', '')) %}
{%- for tool in ('price', 'stock', 'calculator') %}
{%- set shown.text = shown.text | replace('[assistant calls ' ~ tool ~ '] ',
    '<tool_call>\\n{"name": "' ~ tool ~ '", "arguments": ') %}
{%- endfor %}
{%- for number in range(1, 10) %}
{%- set shown.text = shown.text | replace('<turn-' ~ number ~ '>\\n', '<|im_start|>assistant\\n')
    | replace('\\n</turn-' ~ number ~ '>\\n', '<|im_end|>\\n') %}
{%- endfor %}
{{- shown.text }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}
{{- '\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""


def make_critic(folder: Path, student: str) -> Path:
    """Returns the critic's critic.yml, which is made with its model if it is not there."""
    path = folder / "critic.yml"
    if path.exists():
        return path
    workspace = Workspace(folder)
    start = locate_model(workspace, "demo/teacher").location
    tokenizer = PreTrainedTokenizerFast.from_pretrained(start)
    tokenizer.chat_template = TEMPLATE
    model = Qwen3ForCausalLM.from_pretrained(start, dtype=torch.float32)
    cases = list(_cases(workspace, student))
    examples = [_example(tokenizer, *case) for case in cases[NUM_CHECKED:]]
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    batches = shuffled_batches(examples, batch_size=BATCH_SIZE, seed=SEED)
    report = fit(model, batches, num_steps=NUM_STEPS, peak_learning_rate=PEAK_LEARNING_RATE)
    right = Counter(answer(model, tokenizer, *case[:2]) == case[2] for case in cases[:NUM_CHECKED])
    model.half().save_pretrained(folder / "critic")
    tokenizer.save_pretrained(folder / "critic")
    path.write_text(f"model: {folder / 'critic'}\nprovider: hf\nmax_tokens: 8\n", encoding="utf-8")
    print(
        reported(
            examples=len(examples),
            tokens=report.tokens_read,
            loss=report.final_loss,
            turns=dict(sorted(Counter(case[2] for case in cases).items())),
            accuracy=right[True] / NUM_CHECKED,
        ),
        flush=True,
    )
    return path


def answer(
    model: Any, tokenizer: PreTrainedTokenizerFast, task: Task, turns: Sequence[Sequence[Message]]
) -> int | str:
    """Returns the turn that the critic names, as `refine` reads its likeliest reply."""
    ids: Any = tokenizer.apply_chat_template(
        critic_messages(task, turns), add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    with torch.inference_mode():
        new = model.generate(ids, do_sample=False, max_new_tokens=2)[0, ids.shape[1] :]
    text = tokenizer.decode(new, skip_special_tokens=True)
    return read_turn_number(text, num_turns=len(turns))


def _cases(workspace: Workspace, student: str) -> Iterator[tuple[Task, list[list[Message]], int]]:
    """Yields failed rollouts of the demo's student, each with its task and first wrong turn."""
    root = workspace.root
    tasks = training_tasks(NUM_TASKS, seed=SEED)
    if not (root / "tools.py").exists():
        root.mkdir(parents=True, exist_ok=True)
        create_project(workspace, CreateProject())
    rows = (json.dumps(task_row(task)) + "\n" for task in tasks)
    (root / PROMPTS).write_text("".join(rows), encoding="utf-8")
    request = GenerateRollouts(
        input=PROMPTS, output=ROLLOUTS, **policy(student), temperature=1.0,
        seed=SEED, **ACTING,
    )  # fmt: skip
    folder = workspace.runs / "rollouts"
    folder.mkdir(parents=True, exist_ok=True)

    async def play() -> None:
        await generate_rollouts(workspace, request, folder=folder, reporter=SilentReporter())

    if not (root / f"{ROLLOUTS}.manifest.json").exists():
        anyio.run(play)
    pairs = zip(load_tasks(root / PROMPTS), tasks, strict=True)
    by_id = {one.task_id: (one, task) for one, task in pairs}
    for task_id, rollout in _failed(root / ROLLOUTS):
        task, plan = by_id[task_id]
        yield task, _turns(rollout), _first_wrong(rollout, plan)


def _failed(path: Path) -> Iterator[tuple[str, RecordedRollout]]:
    with FailedRollouts([path]) as failed:
        for task_id in sorted(failed.tasks):
            yield task_id, failed[RolloutKey(task_id, 0)]


def _turns(rollout: RecordedRollout) -> list[list[Message]]:
    return [[turn, *replies] for turn, replies in rollout.steps]


def _first_wrong(rollout: RecordedRollout, task: ShopTask) -> int:
    """Returns the number of the first turn that leaves the plan."""
    for number, turn in enumerate(rollout.turns, start=1):
        calls = [
            (call["function"]["name"], _arguments(call["function"]["arguments"]))
            for call in turn.get("tool_calls") or []
        ]
        planned = task.gold_plan[number - 1 : number]
        if not planned or calls != [(call.tool, call.arguments) for call in planned]:
            return number
    raise ValueError(f"a rollout of {task.prompt!r} failed though it follows the plan")


def _arguments(written: str) -> Any:
    try:
        return json.loads(written)
    except ValueError:
        return written


def _example(
    tokenizer: PreTrainedTokenizerFast, task: Task, turns: list[list[Message]], number: int
) -> TrainingExample:
    messages: Any = [
        *critic_messages(task, turns),
        {"role": "assistant", "content": str(number)},
    ]
    encoded: Any = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    return TrainingExample(
        encoded["input_ids"], [bool(flag) for flag in encoded["assistant_masks"]]
    )


def agreement(workspace: Workspace, critic: Path, rollouts: Path, refined: Path) -> dict[str, Any]:
    """Returns how often the critic names the turn at which a refined rollout was taken over."""
    loaded: Any = Qwen3ForCausalLM.from_pretrained(critic, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(critic)
    tasks = {task.task_id: task for task in load_tasks(workspace.root / "prompts.jsonl")}
    rows = [json.loads(line) for line in refined.read_text(encoding="utf-8").splitlines()]
    takeovers = {row["task_id"]: row["refined"]["turn"] for row in rows}
    named = [
        (answer(loaded, tokenizer, tasks[task_id], _turns(rollout)), takeovers[task_id])
        for task_id, rollout in _failed(rollouts)
        if task_id in takeovers
    ]
    right = sum(number == 1 + turn for number, turn in named if turn is not None)
    return {"rollouts": len(named), "same_turn": right / len(named)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--student", default="demo/student", help="whose rollouts it learns from")
    parser.add_argument("--check", type=Path, help="a seed's folder of text_teacher.py")
    options = parser.parse_args()
    path = make_critic(options.folder.resolve(), options.student)
    if options.check is not None:
        seed = options.check.resolve()
        pools = (seed / "pool-student.jsonl", seed / "pool-diff.jsonl")
        print(reported(**agreement(Workspace(seed), path.parent / "critic", *pools)))


if __name__ == "__main__":
    main()
