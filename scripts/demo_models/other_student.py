"""Makes the demo's student that cuts text in another way than its teacher.

It has the shipped student's body, a tokenizer and a chat template of its own, and so no token ids
in common with `demo/teacher`. Run it in the folder scripts, after the recipe:
`python -m demo_models.other_student --out FOLDER`.
"""

import argparse
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from demo_models.conversations import gold_messages
from demo_models.curriculum import clerk_examples, echo_examples
from demo_models.pretrain import build_model, fit
from demo_models.recipe import RecipeSettings, TrainedModel, TrainingPhase, batches, ship
from stillroom.demo import DEMO_MODELS
from stillroom.demo.world import SYSTEM, training_tasks
from stillroom.files import write_json

NAME = "other-student"
_MARKS = (
    "<pad>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)  # fmt: skip
_SPLIT = (
    r" (?:answer|is|are|in|of|the|do|much|many|cost|stock|price|total|get|left)\b|\p{N}{1,2}"
    r"|\p{L}{3,}?(?=s\b)|\p{L}+|[^\s\p{L}\p{N}]{1,2}|\s"
)
"""Digits come in pairs, and frequent words with the blank before them."""
_ROLES = {
    "<pad>": "<|endoftext|>", "<s>": "<|endoftext|>", "</s>": "<|im_end|>", "[INST]": "user",
    "[/INST]": "<|im_start|>assistant\n", "[SYSTEM_PROMPT]": "system",
    "[/SYSTEM_PROMPT]": "<|im_end|>", "[AVAILABLE_TOOLS]": "<tools>",
    "[/AVAILABLE_TOOLS]": "</tools>", "[TOOL_CALLS]": "<tool_call>", "[ARGS]": "arguments",
    "[TOOL_RESULTS]": "<tool_response>", "[/TOOL_RESULTS]": "</tool_response>",
}  # fmt: skip
"""The text of the shipped student whose embeddings a mark begins with."""


@dataclass(frozen=True, slots=True)
class OtherStudentSettings:
    """All settings of this recipe; the defaults made the shipped model."""

    max_length: int = 512
    num_merges: int = 220
    num_tokenizer_tasks: int = 1500
    tokenizer_seed: int = 0
    weights_seed: int = 0
    echo: TrainingPhase = field(
        default_factory=lambda: TrainingPhase(
            num_examples=4_800, num_steps=150, batch_size=32, seed=5
        )
    )
    base: TrainingPhase = field(
        default_factory=lambda: TrainingPhase(
            num_examples=14_400, num_steps=900, batch_size=16, seed=6
        )
    )
    learning_rate: float = 4e-3


def build_other_student(folder: Path, settings: OtherStudentSettings) -> None:
    """Writes other-student/ under the folder, and its entry to the RECIPE.json there."""
    started_s = time.process_time()
    torch.set_num_threads(1)
    recipe = RecipeSettings()
    tokenizer = train_other_tokenizer(settings)
    model = _begun_model(tokenizer, settings, num_layers=recipe.student_layers)
    echo, base = settings.echo, settings.base
    echoes = echo_examples(tokenizer, echo.num_examples, seed=echo.seed)
    clerks = clerk_examples(tokenizer, base.num_examples, mix=recipe.base_mix, seed=base.seed)
    report = fit(
        model,
        chain(batches(echoes, echo), batches(clerks, base)),
        num_steps=echo.num_steps + base.num_steps,
        peak_learning_rate=settings.learning_rate,
    )
    trained = TrainedModel(model, report, round(time.process_time() - started_s, 1))
    figures = ship(trained, tokenizer, folder / NAME, settings=recipe)
    path = folder / "RECIPE.json"
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    record["other_student"] = {
        "command": "cd scripts && python -m demo_models.other_student",
        "settings": asdict(settings),
        "vocabulary": len(tokenizer),
        **figures,
    }
    write_json(path, record)


def train_other_tokenizer(settings: OtherStudentSettings) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE that cuts words and numbers in other places than the teacher's."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + settings.num_merges,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_texts(settings), trainer)
    written = json.loads(core.to_str())
    vocabulary, merges = written["model"]["vocab"], written["model"]["merges"]
    for pair in (a + b for a in "0123456789" for b in "0123456789"):
        vocabulary[pair] = len(vocabulary)
        merges.append(list(pair))
    core = Tokenizer.from_str(json.dumps(written))
    core.add_special_tokens([AddedToken(text, special=True) for text in _MARKS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=_MARKS[1],
        eos_token=_MARKS[2],
        pad_token=_MARKS[0],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=settings.max_length,
    )
    template = Path(__file__).with_name("other_chat_template.jinja")
    fast.chat_template = template.read_text(encoding="utf-8")
    return fast


def _texts(settings: OtherStudentSettings) -> Iterator[str]:
    """Yields the texts of gold conversations without their digits, which are cut by rule."""
    for task in training_tasks(settings.num_tokenizer_tasks, seed=settings.tokenizer_seed):
        for message in gold_messages(task):
            text = str(message.get("content"))
            for call in message.get("tool_calls", []):
                text += f" {call['function']['name']} {call['function']['arguments']}"
            yield "".join(letter for letter in text if not letter.isdigit())
    yield from [SYSTEM] * 20


def _begun_model(
    tokenizer: PreTrainedTokenizerFast, settings: OtherStudentSettings, *, num_layers: int
) -> Qwen3ForCausalLM:
    """Returns the shipped student's body under embeddings made of those of the pieces' text."""
    folder = DEMO_MODELS["demo/student"]
    shipped = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    model = build_model(
        tokenizer,
        num_layers=num_layers,
        max_length=settings.max_length,
        seed=settings.weights_seed,
    )
    table: Any = model.model.embed_tokens.weight
    known: Any = shipped.model.embed_tokens.weight
    model.model.layers.load_state_dict(shipped.model.layers.state_dict())
    model.model.norm.load_state_dict(shipped.model.norm.state_dict())
    with torch.no_grad():
        for token_id in range(len(tokenizer)):
            text = str(tokenizer.decode([token_id], skip_special_tokens=False))
            ids = theirs.encode(_ROLES.get(text, text), add_special_tokens=False)
            if ids and "\N{REPLACEMENT CHARACTER}" not in text:
                # The noise keeps a pair of digits apart from both its digits.
                table[token_id] = known[ids].mean(0) + 0.05 * torch.randn(table.shape[1])
    return model


def _main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m demo_models.other_student", description=__doc__
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    transformers.utils.logging.disable_progress_bar()
    build_other_student(parser.parse_args().out, OtherStudentSettings())


if __name__ == "__main__":
    _main()
