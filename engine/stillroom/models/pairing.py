"""What must hold between student and teacher before anything is scored."""

from stillroom.errors import ModelError
from stillroom.models.load import LoadedModel
from stillroom.models.scoring import OFF_POLICY_ROUTE


def check_pair(student: LoadedModel, teacher: LoadedModel) -> None:
    """Raises ModelError unless the teacher reads tokens as the student means them."""
    ours: dict[str, int] = student.tokenizer.get_vocab()
    theirs: dict[str, int] = teacher.tokenizer.get_vocab()
    names = f"student {student.location.name!r} and teacher {teacher.location.name!r}"
    if ours != theirs:
        differing = {t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t)}
        example = min(differing)
        raise ModelError(
            f"{names} have different tokenizers: {len(differing)} tokens differ, e.g. {example!r} "
            f"is {ours.get(example)} and {theirs.get(example)}",
            f"take a teacher of the student's own family, or {OFF_POLICY_ROUTE}",
        )
    for model in (student, teacher):
        _check_vocabulary(model)
    if student.tokenizer.chat_template != teacher.tokenizer.chat_template:
        raise ModelError(
            f"{names} have different chat templates, so the teacher would score a conversation it "
            "was not trained to read",
            "copy the teacher's chat_template.jinja into the student's folder, or "
            + OFF_POLICY_ROUTE,
        )


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
