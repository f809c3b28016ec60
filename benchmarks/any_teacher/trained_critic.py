"""Trains a small critic of the shop clerk's failed rollouts, and measures how often it is right.

    python benchmarks/any_teacher/trained_critic.py FOLDER LEARN CHECK…

The critic is the demo's teacher, trained further: it reads what `refine` asks a critic, and answers
with the number of the first wrong turn. LEARN and CHECK are seeds' folders of `text_teacher.py`. It
learns from LEARN's failed rollouts, four of each prompt (arms `hard4`, `retry`): wrong first is the
turn that leaves the task's plan first. Its chat template leaves out the instruction, which it always
follows, and writes the rollout as the clerk's own turns.

Each CHECK, whose student is another, gets a critic.yml that names the model in FOLDER. After its arm
`trained@300`: how often the critic named the turn at which `takeover: first_difference` takes over.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "on_policy"))
sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import torch
from demo_world import reported
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from demo_models.curriculum import TrainingExample
from demo_models.pretrain import fit, shuffled_batches
from stillroom.data.formats import Task, load_tasks
from stillroom.demo.world import ShopTask, training_tasks
from stillroom.models.resolve import locate_model
from stillroom.rollout.journal.records import RolloutKey
from stillroom.rollout.refine_plan import FailedRollouts, RecordedRollout
from stillroom.rollout.refining import critic_messages
from stillroom.settings import Workspace
from stillroom.types import Message

SEED, NUM_STEPS, BATCH_SIZE, PEAK_LEARNING_RATE = 71, 700, 16, 2e-3
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


def make_critic(folder: Path, lessons: Path) -> None:
    """Trains the critic on the failed rollouts in a seed's folder and writes it to `folder`."""
    start = locate_model(Workspace(lessons), "demo/teacher").location
    tokenizer = PreTrainedTokenizerFast.from_pretrained(start)
    tokenizer.chat_template = TEMPLATE
    model = Qwen3ForCausalLM.from_pretrained(start, dtype=torch.float32)
    cases = list(_cases(lessons))
    examples = [_example(tokenizer, *case) for case in cases]
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    batches = shuffled_batches(examples, batch_size=BATCH_SIZE, seed=SEED)
    begun = time.process_time()
    report = fit(model, batches, num_steps=NUM_STEPS, peak_learning_rate=PEAK_LEARNING_RATE)
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(
        reported(
            examples=len(examples),
            turns=dict(sorted(Counter(case[2] for case in cases).items())),
            tokens=report.tokens_read,
            loss=report.final_loss,
            cpu_s=time.process_time() - begun,
        ),
        flush=True,
    )


def _cases(seed_folder: Path) -> Iterator[tuple[Task, list[list[Message]], int]]:
    """Yields a seed's failed rollouts, each with its task and first wrong turn."""
    tasks = load_tasks(seed_folder / "prompts.jsonl")
    plans = training_tasks(len(tasks), seed=int(seed_folder.name.rpartition("-")[2]))
    by_id = {task.task_id: (task, plan) for task, plan in zip(tasks, plans, strict=True)}
    for task_id, rollout in _failed(seed_folder / "pool-student4.jsonl"):
        task, plan = by_id[task_id]
        yield task, _turns(rollout), _first_wrong(rollout, plan)


def _failed(path: Path) -> Iterator[tuple[str, RecordedRollout]]:
    with FailedRollouts([path]) as failed:
        for task_id, sample in product(sorted(failed.tasks), range(failed.num_samples)):
            if (key := RolloutKey(task_id, sample)) in failed:
                yield task_id, failed[key]


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


def agreement(seed_folder: Path) -> dict[str, Any]:
    """Returns how often the critic named the turn at which `first_difference` took over."""
    named, right = (
        {
            row["task_id"]: row["refined"]["turn"]
            for row in _rows(seed_folder / f"pool-{name}.jsonl")
        }
        for name in ("trained-300", "diff")
    )
    same = [turn == right[task_id] for task_id, turn in named.items()]
    return {"seed": seed_folder.name, "rollouts": len(same), "same_turn": sum(same) / len(same)}


def _rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("learn", type=Path)
    parser.add_argument("check", type=Path, nargs="*")
    options = parser.parse_args()
    critic = options.folder.resolve()
    if not (critic / "model.safetensors").exists():
        make_critic(critic, options.learn.resolve())
    for folder in options.check:
        written = f"model: {critic}\nprovider: hf\nmax_tokens: 8\n"
        (folder / "critic.yml").write_text(written, encoding="utf-8")
        if (folder / "pool-trained-300.jsonl.manifest.json").exists():
            print(reported(**agreement(folder.resolve())), flush=True)


if __name__ == "__main__":
    main()
