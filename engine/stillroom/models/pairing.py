"""Checks that a teacher can score a student's tokens: same tokenizer, template and turn ends.

Needs no torch, so that the server can refuse a teacher before anything is loaded.
"""

import re
from typing import TYPE_CHECKING, Any

from stillroom.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from stillroom.models.load import LoadedModel

OFF_POLICY_ROUTE = (
    "keep the current teacher and train off-policy: generate_rollouts with it, then "
    "filter_dataset, convert_rollouts, and start_training with dataset_type sft. If rollouts have "
    "rewards, generate_rollouts(refine=<the student's rollouts>) then corrects the student's "
    "failures"
)
"""The advice for a teacher that cannot score the student's tokens; always the last in a fix."""
REREAD_ROUTE = (
    "compare student and teacher byte by byte, each with its own tokenizer (in config.yml, with "
    "dataset_type distill: teacher: {path: …, tokens: reread} and algorithm: {loss_fn: "
    "byte_reverse_kl})"
)
"""The advice for a teacher whose tokenizer or template differs."""

_API_MODELS = re.compile(
    r"^(openai/|anthropic/|google/)?(gpt-[0-9]|chatgpt|o[0-9](-|$)|claude|gemini(-|$))",
    re.IGNORECASE,
)
# The number of characters that an error shows of each chat template, from where they differ.
_SHOWN_CHARS = 40


def alternatives(*fixes: str) -> str:
    """Returns several fixes as one text: (a) …; (b) …; or (c) …."""
    *others, last = [f"({letter}) {fix}" for letter, fix in zip("abcdefgh", fixes, strict=False)]
    return "; ".join([*others, f"or {last}"])


def refuse_api_teacher(path: str) -> None:
    """Raises ConfigError for a teacher that cannot return the log-probability of given tokens."""
    if _API_MODELS.match(path):
        raise ConfigError(
            f"Unsupported teacher model {path!r}: distill needs the log-probability of every token "
            "the student wrote, which the APIs of OpenAI, Anthropic and Google do not return",
            alternatives(
                "use an open-weight teacher with the student's tokenizer", OFF_POLICY_ROUTE
            ),
        )


def check_pair(student: "LoadedModel", teacher: "LoadedModel") -> None:
    """Raises ModelError unless both models have the same tokens, chat template and stop tokens."""
    names = f"student {student.location.name!r} and teacher {teacher.location.name!r}"
    check_tokenizers(names, student.tokenizer, teacher.tokenizer)
    for model in (student, teacher):
        model.check_vocabulary()
    vocabulary: dict[str, int] = student.tokenizer.get_vocab()
    sampled = [token for token in vocabulary.values() if token < student.num_embeddings]
    teacher.check_ids([sampled], "the student")
    extra = teacher.stop_ids - student.stop_ids
    if student.stop_ids and extra:
        marks = ", ".join(repr(student.tokenizer.convert_ids_to_tokens(i)) for i in sorted(extra))
        raise ModelError(
            f"{names} have different end-of-turn tokens: the teacher also ends a turn at {marks}, "
            "where the student would continue up to its limit",
            alternatives(
                f"add the ids of {marks} to eos_token_id in the student's generation_config.json",
                REREAD_ROUTE,
                OFF_POLICY_ROUTE,
            ),
        )


def check_tokenizers(names: str, student: Any, teacher: Any) -> None:
    """Raises ModelError unless two tokenizers have the same tokens and chat template.

    names: the two models, for the error.
    """
    student_ids: dict[str, int] = student.get_vocab()
    teacher_ids: dict[str, int] = teacher.get_vocab()
    if student_ids != teacher_ids:
        tokens = student_ids.keys() | teacher_ids.keys()
        differing = {t for t in tokens if student_ids.get(t) != teacher_ids.get(t)}
        example = min(differing)
        raise ModelError(
            f"{names} have different tokenizers: {len(differing)} tokens differ, e.g. {example!r} "
            f"is {student_ids.get(example)} and {teacher_ids.get(example)}",
            alternatives(
                "use a teacher of the student's model family", REREAD_ROUTE, OFF_POLICY_ROUTE
            ),
        )
    if student.chat_template != teacher.chat_template:
        raise ModelError(
            f"{names} have different chat templates, so the teacher would score a format that it "
            f"was not trained on: {_difference(student.chat_template, teacher.chat_template)}",
            alternatives(
                "copy the teacher's chat_template.jinja into the student's folder",
                REREAD_ROUTE,
                OFF_POLICY_ROUTE,
            ),
        )


def _difference(student_template: str, teacher_template: str) -> str:
    """Describes where two chat templates begin to differ, and how each continues from there."""
    pairs = enumerate(zip(student_template, teacher_template, strict=False))
    end = min(len(student_template), len(teacher_template))
    start = next((i for i, (a, b) in pairs if a != b), end)
    line = student_template.count("\n", 0, start) + 1
    shown = [text[start : start + _SHOWN_CHARS] for text in (student_template, teacher_template)]
    return (
        f"from character {start} (line {line}) on, the student's has {shown[0]!r} and the "
        f"teacher's {shown[1]!r}"
    )
