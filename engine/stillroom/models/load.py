"""Loads models and tokenizers, and raises errors that say what to do if that fails."""

import json
import os
import re
import warnings
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.hub import cached_file

from stillroom.data.chat.render import ChatRenderer
from stillroom.data.chat.template import (
    PROBE,
    SENTINEL,
    ChatTemplate,
    is_chatml_without_tools,
    template_file,
)
from stillroom.errors import ConfigError, ModelError
from stillroom.models.chat_template import TemplateSource
from stillroom.models.gguf.folder import pretrained_path
from stillroom.models.multimodal import (
    KEY_MAPPING,
    is_for_multimodal,
    is_multimodal,
    language_model_name,
    make_standalone,
    renamed_settings,
    silence_unused_weights,
    text_options,
    text_part_names,
    weight_names,
)
from stillroom.models.placement import (
    best_device,
    check_options,
    dtype_for,
    input_device,
    spread_options,
)
from stillroom.models.precision import Precision, Quantization, disable_bf16_inference, nf4_options
from stillroom.models.resolve import ModelLocation, adapter_base
from stillroom.settings import Workspace
from stillroom.types import Message

_PROBE_CHAT: list[Message] = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello"},
]
# Models with fewer parameters run faster on one thread than on several, which mostly wait.
_ONE_THREAD_PARAMETERS = 30_000_000
_END_TOKEN = re.compile(r"end|eo[stm]\b|eo[stm]_|^</s>$", re.IGNORECASE)
_MAX_SHOWN_TOKENS = 8


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its tokenizer, on its device."""

    location: ModelLocation
    model: PreTrainedModel
    tokenizer: Any
    stop_ids: frozenset[int]
    """The ids of the tokens that end an assistant turn."""

    @property
    def device(self) -> torch.device:
        """The device that the model's inputs must be on."""
        return input_device(self.model)

    @property
    def max_context(self) -> int:
        """The maximum number of tokens of a sequence."""
        return context_length(self.model)

    @property
    def num_embeddings(self) -> int:
        """The number of token ids that the model has embeddings for."""
        embeddings: Any = self.model.get_input_embeddings()
        return int(embeddings.weight.shape[0])

    def check_vocabulary(self) -> None:
        """Raises ModelError if chats need tokens that the model has no embeddings for.

        Tokens for images or audio (Gemma 3) may have no embedding.
        """
        vocabulary: dict[str, int] = self.tokenizer.get_vocab()
        if max(vocabulary.values()) < self.num_embeddings:
            return
        needed = set(self.stop_ids)
        with suppress(ModelError):
            [chat, *_] = ChatRenderer(self.tokenizer).sequences(_PROBE_CHAT, [])
            needed |= set(chat.ids)
        self.check_ids([sorted(needed)], "its chat template")

    def check_ids(self, sequences: Iterable[Sequence[int]], needed_by: str) -> None:
        """Raises ModelError for a token that the model has no embedding for.

        needed_by: what needs the tokens, for the error.
        """
        largest = max((max(ids, default=0) for ids in sequences), default=0)
        if largest >= (num := self.num_embeddings):
            text = self.tokenizer.convert_ids_to_tokens(largest)
            raise ModelError(
                f"{self.location.name!r} has embeddings for {num} tokens, but {needed_by} needs "
                f"token {largest}, {text!r}",
                "use the tokenizer that belongs to the model, or save the model again after "
                f"model.resize_token_embeddings({largest + 1})",
            )


def context_length(model: Any) -> int:
    """Returns the maximum number of tokens of a sequence, from the model's configuration."""
    config = model.config.get_text_config()
    max_positions = getattr(config, "max_position_embeddings", 1 << 20)
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    # Dynamic RoPE extends the context beyond the configured one.
    factor = rope["factor"] if rope.get("rope_type") == "dynamic" else 1
    return int(max_positions * factor)


def load_tokenizer(location: ModelLocation, *, template: TemplateSource | None = None) -> Any:
    """Returns a model's tokenizer; `template` replaces its own chat template.

    Raises ModelError unless it has exactly one chat template, and ConfigError if `template` does
    not end turns with a special token of the model.
    """
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(pretrained_path(location))
    except (OSError, ValueError, KeyError) as error:
        raise _load_error("tokenizer", location, error) from error
    if template is not None:
        tokenizer.chat_template = template_text(template)
        _check_end_of_turn(tokenizer, template, location.name)
    if not tokenizer.chat_template:
        tokenizer.chat_template = _processor_template(location)
    if not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer of {location.name!r} has no chat template",
            "use an instruct model, add chat_template.jinja to the model's folder, or set "
            "chat_template for a student (in config.yml: model.chat_template)",
        )
    if not isinstance(tokenizer.chat_template, str):
        names = ", ".join(sorted(tokenizer.chat_template))
        raise ModelError(
            f"the tokenizer of {location.name!r} has several chat templates ({names})",
            "copy the model to a folder, and keep only the template to use, as chat_template.jinja",
        )
    return tokenizer


def template_text(template: TemplateSource) -> str:
    """Returns the Jinja text of a template. Raises ConfigError if a file is not UTF-8."""
    if isinstance(template.origin, ModelLocation):
        return load_tokenizer(template.origin).chat_template
    try:
        return template.origin.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{template.option} {template.name!r} is not UTF-8 text ({error.reason})",
            "give a file with a Jinja template",
        ) from error


def _check_end_of_turn(tokenizer: Any, source: TemplateSource, model: str) -> None:
    """Raises ConfigError if no special token of the model ends an answer in the template."""
    template = ChatTemplate(tokenizer, include_thinking=False)
    answered = template.text([*PROBE, {"role": "assistant", "content": SENTINEL}], [])
    try:
        _ = template.end_of_turn
    except ModelError as error:
        end = answered.partition(SENTINEL)[2].strip()
        ends = [token for token in template.control_tokens if _END_TOKEN.search(token)]
        shown = ", ".join((ends or template.control_tokens)[:_MAX_SHOWN_TOKENS]) or "none"
        raise ConfigError(
            f"{source.option} {source.name!r} ends an answer with {end[:80]!r}, which is not "
            f"a special token of {model!r}, so the student could not learn to stop",
            f"use a template that ends answers with a token of the model: {shown}",
        ) from error


def _check_trained_template(location: ModelLocation, template: TemplateSource, text: str) -> None:
    """Raises ConfigError if `text` is not the chat template that the model was trained with.

    The template `chatml` may replace a ChatML template that leaves tools out.
    """
    if not location.is_trained:
        return
    trained = load_tokenizer(location).chat_template
    if trained == text:
        return
    if not is_chatml_without_tools(trained) or text != _read_named_template("chatml"):
        raise ConfigError(
            f"{template.option} {template.name!r} is not the template that {location.name!r} was "
            "trained with",
            "leave it out: checkpoints and exports keep their template",
        )


def _read_named_template(name: str) -> str:
    return template_file(name).read_text(encoding="utf-8")


def include_tools(loaded: LoadedModel) -> list[str]:
    """Replaces a chat template that leaves tools out with the template `chatml`.

    Returns a note for the user, in a list; [] if the template includes tools.
    """
    if not is_chatml_without_tools(loaded.tokenizer.chat_template):
        return []
    loaded.tokenizer.chat_template = _read_named_template("chatml")
    note = (
        f"the chat template of {loaded.location.name} leaves tools out, so the template chatml, "
        "which includes them, is used instead"
    )
    return [note]


def _processor_template(location: ModelLocation) -> Any:
    """Returns the chat template in a multimodal model's processor files, or None."""
    for name in ("chat_template.json", "processor_config.json"):
        try:
            path = cached_file(pretrained_path(location), name)
            settings = json.loads(Path(path).read_bytes()) if path is not None else {}
        except (OSError, ValueError):
            continue  # most models have no such file
        if template := settings.get("chat_template"):
            return template
    return None


def load_model(
    workspace: Workspace,
    location: ModelLocation,
    *,
    precision: Precision = "auto",
    quantization: Quantization = None,
    spread: bool = False,
    template: TemplateSource | None = None,
) -> LoadedModel:
    """Returns a model ready to run, with an adapter's weights merged into its base.

    On a 4-bit base the adapter is not merged, because that cannot be done exactly. `template`
    replaces the model's own chat template. Raises ModelError for an adapter with `spread`, and
    ConfigError for a `template` other than the one that Stillroom trained the model with.
    """
    if location.is_adapter and spread:
        raise ModelError(
            f"spread: true does not support adapters such as {location.name!r}",
            "merge the adapter into its base with export_model, and use the merged folder",
        )
    tokenizer = load_tokenizer(location, template=template)
    if template is not None:
        _check_trained_template(location, template, tokenizer.chat_template)
    if location.is_adapter:
        model = load_adapter(workspace, location, precision=precision, quantization=quantization)
        model = model if quantization is not None else model.merge_and_unload()
    else:
        model = load_weights(
            location, precision=precision, quantization=quantization, spread=spread
        )
    model.eval()
    loaded = LoadedModel(location, model, tokenizer, stop_token_ids(model, tokenizer))
    loaded.check_vocabulary()
    return loaded


def load_weights(
    location: ModelLocation,
    *,
    precision: Precision = "auto",
    quantization: Quantization = None,
    keep_on_cpu: bool = False,
    spread: bool = False,
) -> PreTrainedModel:
    """Returns a causal language model on the best available device (CUDA, Apple GPU, CPU).

    keep_on_cpu: leaves the model on the CPU, but in the dtype of the best device, to which each
    process later moves its shard; ignored with nf4. spread: distributes the layers over all GPUs;
    such a model can run but not be trained.
    """
    device = best_device()
    check_options(device, quantization=quantization, spread=spread)
    dtype = dtype_for(precision, device)
    options = nf4_options(dtype, device) if quantization == "nf4" else {}
    if spread:
        options |= spread_options()
    model: Any = read_weights(location, dtype=dtype, **options)
    if quantization == "nf4":
        disable_bf16_inference(model)
        return model
    return model if keep_on_cpu or spread else model.to(device)


def read_weights(
    location: ModelLocation, *, dtype: torch.dtype | Literal["auto"], **options: Any
) -> PreTrainedModel:
    """Returns a causal language model on the CPU; of a multimodal model, its text part only.

    dtype: `auto` keeps the dtype of the files. options: passed on to `from_pretrained`.
    """
    transformers.utils.logging.disable_progress_bar()
    try:
        part = text_options(location)
        with silence_unused_weights() if part else nullcontext():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                pretrained_path(location),
                dtype=dtype,
                use_safetensors=True,
                output_loading_info=True,
                **part,
                **options,
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise _load_error("model", location, error) from error
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        # transformers has set the missing weights to random values.
        raise ModelError(
            f"the files of {location.name!r} lack {len(missing)} of its weights, e.g. {missing[0]}",
            "use a complete causal language model",
        )
    if part:
        make_standalone(model)
    if location.is_gguf:
        # An adapter saved on this model must name the GGUF file, not the converted folder.
        model.name_or_path = location.location
    set_num_threads(model)
    return model


def load_adapter(
    workspace: Workspace,
    location: ModelLocation,
    *,
    precision: Precision = "auto",
    quantization: Quantization = None,
    is_trainable: bool = False,
    keep_on_cpu: bool = False,
) -> Any:
    """Returns the peft model of a LoRA checkpoint, with its base model loaded."""
    base_location = adapter_base(workspace, location)
    base = load_weights(
        base_location, precision=precision, quantization=quantization, keep_on_cpu=keep_on_cpu
    )
    return attach_adapter(base, location, is_trainable=is_trainable)


def attach_adapter(
    base: PreTrainedModel, location: ModelLocation, *, is_trainable: bool = False
) -> Any:
    """Returns the peft model of a LoRA checkpoint on the given base model.

    An adapter of a whole multimodal model is reduced to the weights of the text part. Raises
    ModelError if weights are missing, because the adapter was trained on another model.
    """
    from peft import PeftConfig, PeftModel

    options: dict[str, Any] = {}
    try:
        names = weight_names(location.path)
        config: Any = PeftConfig.from_pretrained(location.location)
        if not is_multimodal(base) and is_for_multimodal(names):
            names = text_part_names(names)
            changed = renamed_settings(config.to_dict(), names, language_model_name)
            for setting, value in changed.items():
                setattr(config, setting, set(value) if setting == "target_modules" else value)
            options = {"key_mapping": KEY_MAPPING}
        with warnings.catch_warnings():
            # peft initialises missing weights to a no-op and only warns.
            warnings.filterwarnings("error", message=".*Found missing adapter keys")
            return PeftModel.from_pretrained(
                base, location.location, config=config, is_trainable=is_trainable, **options
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise _load_error("adapter", location, error) from error
    except UserWarning as warning:
        raise ModelError(
            f"the files of the adapter {location.name!r} lack weights: {warning}",
            "check that the adapter was trained on this base model",
        ) from warning


def stop_token_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Returns the ids of the tokens that end an assistant turn, by the model and its tokenizer."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    listed: list[Any] = configured if isinstance(configured, list) else [configured]
    model_ids = frozenset(token for token in listed if isinstance(token, int))
    return model_ids | stop_ids_of_tokenizer(tokenizer)


def stop_ids_of_tokenizer(tokenizer: Any) -> frozenset[int]:
    """Returns the ids of the tokens that end an assistant turn by tokenizer and chat template."""
    listed: list[Any] = [tokenizer.eos_token_id]
    # A base model's end of text often differs from the token with which its template ends turns.
    with suppress(ModelError):
        listed.append(tokenizer.convert_tokens_to_ids(ChatRenderer(tokenizer).end_of_turn))
    return frozenset(token for token in listed if isinstance(token, int))


def set_num_threads(model: PreTrainedModel) -> None:
    """Sets torch's number of CPU threads by the model's size, unless OMP_NUM_THREADS is set."""
    if "OMP_NUM_THREADS" in os.environ:
        return
    is_small = model.num_parameters() < _ONE_THREAD_PARAMETERS
    torch.set_num_threads(1 if is_small else max(1, (os.cpu_count() or 2)))


def _load_error(kind: str, location: ModelLocation, error: BaseException) -> ModelError:
    """Returns the error for a model, tokenizer or adapter (`kind`) that failed to load."""
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
    fix = (
        f"check the files in {Path(location.location)}"
        if location.is_local
        else "check the name and the connection to the hub, from which it is downloaded once (with "
        "HF_TOKEN if it is gated)"
    )
    return ModelError(f"cannot load the {kind} of {location.name!r}: {first_line}", fix)
