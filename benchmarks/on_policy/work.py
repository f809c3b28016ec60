"""What is distilled in the benchmarks: two models with random weights, prompts, tools' replies."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beside_trl.models import SHAPES, save_model

from stillroom.types import Message

SYSTEM = "You look things up and answer in one short line. " * 4
REPLY_CHARS = 240
"""Of a tool's reply."""


@dataclass(frozen=True)
class Work:
    """One row of the table."""

    phase: str
    """generate, update (of rollouts that are given) or step (both)."""
    shape: str = "152k"
    num_prompts: int = 2
    group: int = 4
    """Rollouts of each prompt."""
    turns: int = 1
    turn_tokens: int = 48
    """Every turn ends after as many: nobody waits for the longest, and little is padding."""
    prompt_chars: int = 1400
    is_lora: bool = False
    loss_fn: str = "full_reverse_kl"

    @property
    def num_rollouts(self) -> int:
        """How many rollouts a step has."""
        return self.num_prompts * self.group

    @property
    def num_sampled(self) -> int:
        """How many tokens of a step are sampled."""
        return self.num_rollouts * self.turns * self.turn_tokens


WORKS = {
    "generate": Work("generate"),
    "generate-tools": Work("generate", turns=4),
    "update": Work("update"),
    "update-tools": Work("update", turns=4),
    "step": Work("step"),
    "step-tools": Work("step", turns=4),
    "step-tools-lora": Work("step", turns=4, is_lora=True),
    "step-tools-32k": Work("step", shape="32k", turns=4),
}


def save_models(shape: str, root: Path) -> tuple[Path, Path]:
    """Returns the folders of a student and a teacher; the same for the same shape."""
    student, teacher = (_save_model(shape, root / f"{shape}-{seed}", seed) for seed in (7, 8))
    return student, teacher


def _save_model(shape: str, folder: Path, seed: int) -> Path:
    if folder.exists():
        return folder
    # So that the two disagree by some nats.
    save_model(shape, folder, seed=seed, initializer_range=0.06)
    _fill_vocabulary(folder / "tokenizer.json", int(SHAPES[shape]["vocab_size"]))
    return folder


def _fill_vocabulary(file: Path, size: int) -> None:
    """Gives every row of the embeddings a token, so that all of them may be sampled."""
    document = json.loads(file.read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = document["model"]["vocab"]
    taken = set(vocabulary.values()) | {token["id"] for token in document["added_tokens"]}
    vocabulary |= {f"w{i}": i for i in range(size) if i not in taken}
    file.write_text(json.dumps(document), encoding="utf-8")


def prompts(work: Work, step: int) -> list[list[Message]]:
    """Returns a step's prompts, each as often as it is answered."""
    rng = random.Random(step)
    chats: list[list[Message]] = []
    for _ in range(work.num_prompts):
        requested = text(rng, work.prompt_chars)
        chat: list[Message] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": requested},
        ]
        chats += [chat] * work.group
    return chats


def reply(step: int, rollout: int, turn: int) -> str:
    """Returns what a tool says."""
    return text(random.Random(f"{step} {rollout} {turn}"), REPLY_CHARS)


def text(rng: random.Random, chars: int) -> str:
    words = ("price", "item", "shop", "stock", "order", "colour", "size", "list", "total", "seven")
    said = ""
    while len(said) < chars:
        said += f"{rng.choice(words)} {rng.randrange(100)} "
    return said


def tool_call() -> dict[str, Any]:
    """Returns the assistant's message that calls the tool."""
    function = {"name": "look_up", "arguments": {"name": "x"}}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": "call_0", "function": function}],
    }
