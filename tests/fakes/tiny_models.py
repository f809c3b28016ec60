"""Tiny models with random weights, built from their configurations, and their tokenizers.

The weights are large enough that what is sampled varies, and the end of a turn is favoured so far
that turns end after a dozen tokens or so.
"""

import copy
import shutil
import tempfile
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from fakes import chat_templates
from stillroom.models.load import LoadedModel, load_model
from stillroom.models.resolve import ModelLocation
from stillroom.settings import Workspace

LINES = [
    "The price of the lamp is 12. The answer is 12.",
    "What does the red chair cost? How many are in stock?",
    '{"name": "price", "arguments": {"item": "lamp"}}',
    '{"name": "stock", "parameters": {"item": "chair"}}',
    "user assistant system tool model ipython think answer",
]
CONTROL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>",
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>",
    "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "<|User|>", "<|Assistant|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>",
]  # fmt: skip
MARKUP = [
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]
CALL = '<tool_call>\n{"name": "price", "arguments": {"item": "lamp"}}\n</tool_call>'
ANSWER = "The answer is 12."
THOUGHT = "hm\n</think>\n\nThe answer is 12."
PHRASES = {"clerk": (CALL, ANSWER), "thinker": (CALL, THOUGHT)}
"""What models of these families say: one token each, one as likely as the other."""
VOCABULARY = 352
END_OF_TURN_SHARE = 0.06


@dataclass(frozen=True)
class Family:
    """A chat template with the tokens that go with it."""

    template: str
    bos: str
    eos: str


FAMILIES = {
    "chatml": Family(chat_templates.CHATML, "<|endoftext|>", "<|im_end|>"),
    "chatml-tagged": Family(chat_templates.CHATML_TAGGED, "<|endoftext|>", "<|im_end|>"),
    "qwen3": Family(chat_templates.QWEN3, "<|endoftext|>", "<|im_end|>"),
    "llama3": Family(chat_templates.LLAMA3, "<|begin_of_text|>", "<|eot_id|>"),
    "gemma": Family(chat_templates.GEMMA, "<bos>", "<end_of_turn>"),
    "mistral": Family(chat_templates.MISTRAL, "<s>", "</s>"),
    "deepseek": Family(chat_templates.DEEPSEEK, "<s>", "</s>"),
    "phi3": Family(chat_templates.PHI3, "<s>", "<|endoftext|>"),
    "always-thinks": Family(chat_templates.ALWAYS_THINKS, "<|endoftext|>", "<|im_end|>"),
    "clerk": Family(chat_templates.CHATML, "<|endoftext|>", "<|im_end|>"),
    "thinker": Family(chat_templates.ALWAYS_THINKS, "<|endoftext|>", "<|im_end|>"),
    "toolless": Family(chat_templates.TOOLLESS, "<|endoftext|>", "<|im_end|>"),
    "forgetful": Family(chat_templates.FORGETFUL, "<|endoftext|>", "<|im_end|>"),
}
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
_GEMMA: dict[str, Any] = {**_SIZES, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}
ARCHITECTURES: dict[str, Callable[..., Any]] = {
    "qwen3": lambda **ids: Qwen3Config(**_SIZES, **ids, head_dim=8, tie_word_embeddings=True),
    "llama": lambda **ids: LlamaConfig(**_SIZES, **ids, tie_word_embeddings=False),
    "gemma2": lambda **ids: Gemma2Config(
        **_GEMMA, **ids, attn_logit_softcapping=5.0, final_logit_softcapping=10.0
    ),
    "gemma3": lambda **ids: Gemma3TextConfig(
        **{**_GEMMA, "num_hidden_layers": 3},
        **ids,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "mistral": lambda **ids: MistralConfig(**_SIZES, **ids, sliding_window=None),
    "mistral-sliding": lambda **ids: MistralConfig(**_SIZES, **ids, sliding_window=8),
    "phi3": lambda **ids: Phi3Config(**_SIZES, **ids, sliding_window=16),
    "cohere": lambda **ids: CohereConfig(**_SIZES, **ids, logit_scale=0.25, use_qk_norm=True),
    "granite": lambda **ids: GraniteConfig(**_SIZES, **ids, logits_scaling=2.0),
    "qwen3.5": lambda **ids: Qwen3_5TextConfig(
        **_SIZES,
        **ids,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        tie_word_embeddings=False,
    ),
}
"""From a name to the configuration of a model with random weights."""


def build_tokenizer(family: str = "chatml") -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer; every family has the same tokens.

    A family with phrases has each of them as one token.
    """
    phrases = PHRASES.get(family, ())
    core = Tokenizer(BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(CONTROL) - len(MARKUP) - len(phrases),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(LINES, trainer)
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    core.add_tokens([AddedToken(text, normalized=False) for text in [*phrases, *MARKUP]])
    chosen = FAMILIES[family]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=chosen.bos,
        eos_token=chosen.eos,
        pad_token=CONTROL[0],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chosen.template
    return tokenizer


def build_model(architecture: str, tokenizer: Any, *, seed: int = 0, **changes: Any) -> Any:
    """Returns a random model; `changes` are set on its configuration."""
    eos = tokenizer.eos_token_id
    config = ARCHITECTURES[architecture](bos_token_id=tokenizer.bos_token_id, eos_token_id=eos)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    favour_end_of_turn(model, eos)
    known = tokenizer.get_vocab()
    for phrases in PHRASES.values():
        if all(phrase in known for phrase in phrases):
            make_clerk(model, tokenizer, phrases)
    return model


@torch.no_grad()
def favour_end_of_turn(model: PreTrainedModel, eos: int) -> None:
    """Raises the probability of the token `eos` to END_OF_TURN_SHARE on average.

    One coordinate is the same for all tokens in every layer; `eos` depends on it alone.
    """
    base = model.base_model
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            weight[0] = 0.0
    head[:, 0] = 0.0
    head[eos] = 0.0
    embedding[:, 0] = 1.0
    start, low, high = head[eos, 0].clone(), 0.0, 64.0
    probe = torch.randint(0, VOCABULARY, (4, 32))
    if head is not embedding:
        # Below the head nothing changes, so it is computed once.
        states = base(probe)
        base.forward = lambda **_: states
    for _ in range(20):
        middle = (low + high) / 2
        head[eos, 0] = start + middle
        share = model(probe).logits.softmax(-1)[..., eos].mean().item()
        low, high = (middle, high) if share < END_OF_TURN_SHARE else (low, middle)
    vars(base).pop("forward", None)


@torch.no_grad()
def make_clerk(model: PreTrainedModel, tokenizer: Any, phrases: Sequence[str]) -> None:
    """Makes the model say one of two phrases, one as likely as the other, and end its turn then.

    The model must have a head of its own, not its embeddings.
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            weight[:3] = 0.0
    line_end = tokenizer.encode("\n", add_special_tokens=False)[-1]
    call, answer, end = tokenizer.convert_tokens_to_ids([*phrases, tokenizer.eos_token])
    embedding[:, 1:3] = 0.0
    head[:, 1:3] = 0.0
    embedding[line_end, 1] = embedding[call, 2] = embedding[answer, 2] = 100.0
    head[call, 1] = head[answer, 1] = head[end, 2] = 4.0
    head[answer] = head[call].clone()


@dataclass(frozen=True)
class TinyModels:
    """Saves tiny models on demand, each once; `root` is a workspace.

    Several processes may share one root.
    """

    root: Path
    _kept: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    def copy_of(self, key: Hashable, load: Callable[[], Any]) -> Any:
        """Returns a copy of what `load` gives, which is called once: a copy takes a fifth as long.

        key: says what is loaded, from folders of this class alone, which never change.
        """
        if key not in self._kept:
            self._kept[key] = load()
        return copy.deepcopy(self._kept[key])

    @property
    def workspace(self) -> Workspace:
        """The workspace that holds the models' folders."""
        return Workspace(self.root)

    def folder(
        self, architecture: str = "qwen3", family: str = "chatml", *, seed: int = 0, **changes: Any
    ) -> Path:
        """Returns the folder of a saved model."""
        marks = [architecture, family, str(seed), *(f"{k}={v}" for k, v in changes.items())]
        folder = self.root / "-".join(marks).replace("/", "_")
        if not folder.exists():
            transformers.utils.logging.disable_progress_bar()
            tokenizer = build_tokenizer(family)
            self.root.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(dir=self.root))
            build_model(architecture, tokenizer, seed=seed, **changes).save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            try:
                partial.rename(folder)
            except OSError:
                # Another process of the tests has built it in the meantime.
                shutil.rmtree(partial)
        return folder

    def location(self, architecture: str = "qwen3", family: str = "chatml", **more: Any) -> Any:
        """Returns where the saved model is."""
        folder = self.folder(architecture, family, **more)
        return ModelLocation(folder.name, str(folder), is_local=True)

    def load(self, architecture: str = "qwen3", family: str = "chatml", **more: Any) -> LoadedModel:
        """Returns the model loaded as the engine loads it."""
        location = self.location(architecture, family, **more)
        return self.copy_of(location, lambda: load_model(self.workspace, location))
