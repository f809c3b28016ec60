"""What masks are held against: the families' tokenizers, what ends their turns, what is trained."""

from fakes.conversations import PRICE
from fakes.mask_families import MASK_FAMILIES, mask_tokenizer
from stillroom.data.chat.render import RenderedConversation

TOKENIZERS = {name: mask_tokenizer(family) for name, family in MASK_FAMILIES.items()}
ENDS = {
    "llama": {"<|eot_id|>"},
    "mistral": {"</s>"},
    "gemma": {"<end_of_turn>"},
    "phi": {"<|end|>"},
    "deepseek": {"<|eos|>"},
    "harmony": {"<|return|>", "<|call|>"},
    "glm": {"<|endoftext|>"},
    "our-llama3": {"<|eot_id|>"},
    "our-gemma": {"<end_of_turn>"},
}
SEES = {**PRICE, "function": {**PRICE["function"], "description": "It looks up a price."}}


def stretches(one: RenderedConversation, name: str) -> list[tuple[str, list[int], str]]:
    """Every trained stretch: the text before it, its tokens, its text; by the tokens alone."""
    found, start = [], 0
    marks = [*one.trained, False]
    for index in range(1, len(marks)):
        if marks[index] != marks[index - 1]:
            if marks[index - 1]:
                ids = one.ids[start:index]
                before, upto = (
                    TOKENIZERS[name].decode(one.ids[:n], skip_special_tokens=False)
                    for n in (start, index)
                )
                assert upto.startswith(before)
                found.append((before, ids, upto[len(before) :]))
            start = index
    return found
