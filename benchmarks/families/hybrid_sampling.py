"""CPU time of sampling a hybrid model, beside plain attention and beside transformers' generate.

    python benchmarks/families/hybrid_sampling.py [--family qwen3_5] [--hidden 256] [--rows 32]

One episode in each row: a prompt, three turns with a tool's reply after each, and a last turn.
Every turn has the same number of tokens for everybody; prompts and replies are of unequal lengths.
`against_attention` is the engine's CPU time for the hybrid as a multiple of its time for a model
with attention in every layer, of the same width, depth and tokens. `against_generate` is how many
times as long transformers' generate takes for the hybrid's turns, in left-padded batches. The
smallest time of several rounds counts, and the rounds of the three take turns.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    FalconH1Config,
    GraniteMoeHybridConfig,
    Lfm2Config,
    NemotronHConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from stillroom.models.load import LoadedModel
from stillroom.models.resolve import ModelLocation
from stillroom.policy.decode import DecodeEngine
from stillroom.policy.sequences import DecodedSequence
from stillroom.types import SamplingSettings

FAMILIES = ("qwen3_5", "lfm2", "bamba", "granite4", "nemotron_h", "falcon_h1")
NUM_REPLIES, NEW_TOKENS, VOCABULARY, LAYERS = 3, 24, 4096, 4


class _Words:
    """The part of a tokenizer that the engine asks for."""

    def get_vocab(self) -> dict[str, int]:
        return {"last": VOCABULARY - 1}


def shape(hidden: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": max(2, hidden // 64),
        "num_key_value_heads": max(1, hidden // 128),
        "max_position_embeddings": 4096,
    }


def hybrid_config(family: str, hidden: int) -> Any:
    sizes = shape(hidden)
    if family == "lfm2":
        kinds = ["conv", "conv", "full_attention", "conv"]
        return Lfm2Config(**sizes, layer_types=kinds, block_auto_adjust_ff_dim=False)
    mamba = {
        "mamba_n_heads": hidden // 16, "mamba_d_head": 32, "mamba_d_state": 64,
        "mamba_n_groups": 1, "mamba_chunk_size": 64,
    }  # fmt: skip
    if family == "bamba":
        return BambaConfig(**sizes, **mamba, attn_layer_indices=[3])
    if family == "falcon_h1":
        # Each layer has both Mamba and attention, which is half as wide as elsewhere; these are the
        # proportions of the published model of 0.5B.
        own = {
            "intermediate_size": 2 * hidden, "num_attention_heads": max(1, hidden // 128),
            "num_key_value_heads": max(1, hidden // 512), "mamba_n_heads": 3 * hidden // 128,
            "mamba_d_head": 64, "mamba_d_ssm": 3 * hidden // 2, "mamba_d_state": hidden // 8,
            "head_dim": 64,
        }  # fmt: skip
        return FalconH1Config(**sizes | mamba | own)
    if family == "granite4":
        kinds = ["linear_attention"] * 3 + ["full_attention"]
        return GraniteMoeHybridConfig(
            **sizes, **mamba, layer_types=kinds, shared_intermediate_size=3 * hidden,
            num_local_experts=0, num_experts_per_tok=0,
        )  # fmt: skip
    if family == "nemotron_h":
        # A layer is either Mamba, attention or an MLP, so that two of them are as deep as one.
        sizes.pop("num_hidden_layers")
        return NemotronHConfig(
            **sizes, layers_block_type=["linear_attention", "mlp"] * 3 + ["full_attention", "mlp"],
            head_dim=64, mamba_num_heads=hidden // 16, mamba_head_dim=32, ssm_state_size=64,
            n_groups=1, chunk_size=64,
        )  # fmt: skip
    heads = max(1, hidden // 128)
    return Qwen3_5TextConfig(
        **sizes, head_dim=64, linear_num_key_heads=heads, linear_num_value_heads=2 * heads,
        linear_key_head_dim=64, linear_value_head_dim=64,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
    )  # fmt: skip


def random_model(config: Any) -> LoadedModel:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    location = ModelLocation("random", "random", is_local=True)
    return LoadedModel(location, model, _Words(), frozenset())


def given_tokens(rows: int) -> list[list[list[int]]]:
    """Returns each row's prompt and replies, of unequal lengths."""
    rng = random.Random(0)

    def drawn(least: int, most: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(rng.randint(least, most))]

    return [[drawn(96, 160), *(drawn(8, 48) for _ in range(NUM_REPLIES))] for _ in range(rows)]


def ours(loaded: LoadedModel, given: Sequence[Sequence[Sequence[int]]]) -> None:
    engine = DecodeEngine(loaded, max_rows=len(given), max_context=4096)
    settings = SamplingSettings(temperature=1.0, max_tokens=NEW_TOKENS)
    left: dict[DecodedSequence, list[Sequence[int]]] = {}
    for seed, (prompt, *replies) in enumerate(given):
        sequence = DecodedSequence(settings, rng=random.Random(seed))
        sequence.append_given(prompt)
        left[sequence] = replies
        engine.request_turn(sequence)
    while engine.has_work:
        for sequence in engine.step():
            if not left[sequence]:
                engine.release(sequence)
                continue
            sequence.append_given(left[sequence].pop(0))
            engine.request_turn(sequence)


def generated(loaded: LoadedModel, given: Sequence[Sequence[Sequence[int]]]) -> None:
    model: Any = loaded.model
    conversations: list[list[int]] = [[] for _ in given]
    for turn in range(NUM_REPLIES + 1):
        conversations = [c + parts[turn] for c, parts in zip(conversations, given, strict=True)]
        longest = max(map(len, conversations))
        ids = torch.tensor([[0] * (longest - len(c)) + c for c in conversations])
        mask = torch.tensor([[0] * (longest - len(c)) + [1] * len(c) for c in conversations])
        output = model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )
        rows = zip(conversations, output.tolist(), strict=True)
        conversations = [conversation + row[longest:] for conversation, row in rows]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--family", default="qwen3_5", choices=FAMILIES)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    hybrid = random_model(hybrid_config(options.family, options.hidden))
    attention = random_model(Qwen3Config(**shape(options.hidden), head_dim=64))
    given = given_tokens(options.rows)
    work: dict[str, Callable[[], None]] = {
        "hybrid": lambda: ours(hybrid, given),
        "attention": lambda: ours(attention, given),
        "generate": lambda: generated(hybrid, given),
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(options.rounds):
        for name, run in work.items():
            started = time.process_time()
            run()
            seconds[name].append(time.process_time() - started)
    best = {name: min(taken) for name, taken in seconds.items()}
    result = {
        "benchmark": "hybrid_sampling",
        "family": options.family,
        "hidden": options.hidden,
        "layers": LAYERS,
        "rows": options.rows,
        "cpu_s": {name: round(value, 3) for name, value in best.items()},
        "against_attention": round(best["hybrid"] / best["attention"], 2),
        "against_generate": round(best["generate"] / best["hybrid"], 2),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
