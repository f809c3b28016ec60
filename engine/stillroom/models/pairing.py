"""What must hold between student and teacher before anything is scored."""

from typing import Any

from stillroom.errors import ModelError
from stillroom.models.load import LoadedModel
from stillroom.models.scoring import OFF_POLICY_ROUTE

_SHOWN = 40
"""Characters of two templates that are shown where they part."""


def check_pair(student: LoadedModel, teacher: LoadedModel) -> None:
    """Raises ModelError unless the teacher reads tokens as the student means them."""
    names = f"student {student.location.name!r} and teacher {teacher.location.name!r}"
    check_tokenizers(names, student.tokenizer, teacher.tokenizer)
    for model in (student, teacher):
        _check_vocabulary(model)
    beyond = teacher.stop_ids - student.stop_ids
    if student.stop_ids and beyond:
        marks = ", ".join(repr(student.tokenizer.convert_ids_to_tokens(i)) for i in sorted(beyond))
        raise ModelError(
            f"{names} end their turns otherwise: the teacher also with {marks}, after which the "
            "student would go on to its limit",
            "add them to eos_token_id in the student's generation_config.json, or "
            + OFF_POLICY_ROUTE,
        )


def check_tokenizers(names: str, student: Any, teacher: Any) -> None:
    """Raises ModelError unless two tokenizers have the same tokens and chat template.

    `names` says whose they are.
    """
    ours: dict[str, int] = student.get_vocab()
    theirs: dict[str, int] = teacher.get_vocab()
    if ours != theirs:
        differing = {t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t)}
        example = min(differing)
        raise ModelError(
            f"{names} have different tokenizers: {len(differing)} tokens differ, e.g. {example!r} "
            f"is {ours.get(example)} and {theirs.get(example)}",
            f"take a teacher of the student's own family, or {OFF_POLICY_ROUTE}",
        )
    if student.chat_template != teacher.chat_template:
        raise ModelError(
            f"{names} have different chat templates, so the teacher would score a conversation it "
            f"was not trained to read: {_parting(student.chat_template, teacher.chat_template)}",
            "copy the teacher's chat_template.jinja into the student's folder, or "
            + OFF_POLICY_ROUTE,
        )


def _parting(ours: str, theirs: str) -> str:
    """Returns where two texts part and how they go on."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    line = ours.count("\n", 0, at) + 1
    shown = [text[at : at + _SHOWN] for text in (ours, theirs)]
    return f"from character {at} (line {line}) on {shown[0]!r} and {shown[1]!r}"


def _check_vocabulary(loaded: LoadedModel) -> None:
    """Raises ModelError if the tokenizer knows tokens that the model has no weights for."""
    size = int(loaded.model.config.get_text_config().vocab_size)
    vocabulary: dict[str, int] = loaded.tokenizer.get_vocab()
    beyond = {token: text for text, token in vocabulary.items() if token >= size}
    if beyond:
        first = min(beyond)
        raise ModelError(
            f"{loaded.location.name!r} has no weights for token {first}, {beyond[first]!r}",
            "resize its embeddings to the tokenizer, or take those tokens out of the tokenizer",
        )
