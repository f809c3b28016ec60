"""The demo models' tokenizer: a small byte-level BPE, trained on the tasks, and chat template."""

from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from demo_models.conversations import gold_messages
from stillroom.demo.shop import PARAMETER
from stillroom.demo.world import SYSTEM, training_tasks

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKUP = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<tools>",
    "</tools>",
)
"""These are one token each but not special, so that decoding keeps them."""
_SPLIT = r"\p{L}{3,}?(?=s\b)|\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s"
"""The split keeps blanks, digits and a plural's s apart. An item is then one token wherever it is
named, and copying it from a prompt into a call is the same operation as copying a digit."""


def train_tokenizer(
    *, num_tasks: int, seed: int, vocabulary_size: int, max_length: int
) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of at most this size; it is smaller if the texts hold too few words."""
    specials = (PAD, TURN_START, TURN_END)
    tokenizer = _byte_level_bpe()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size - len(specials) - len(MARKUP),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(num_tasks, seed=seed), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in MARKUP])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )
    fast.chat_template = chat_template()
    return fast


def chat_template() -> str:
    """Returns the Jinja source of the ChatML template with Hermes tool calls."""
    return Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")


def _byte_level_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _texts(num_tasks: int, *, seed: int) -> Iterator[str]:
    """Yields the texts between the special tokens of gold conversations about training tasks."""
    for tool, parameter in PARAMETER.items():
        yield f"{SYSTEM}\n{tool}({parameter})\n"
    for task in training_tasks(num_tasks, seed=seed):
        for message in gold_messages(task):
            yield f"{message['role']}\n"
            yield str(message.get("content"))
            for call in message.get("tool_calls", []):
                function = call["function"]
                arguments = function["arguments"]
                yield f'\n{{"name": "{function["name"]}", "arguments": {arguments}}}\n'
