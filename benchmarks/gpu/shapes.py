"""What the GPU benchmarks share: models of real shapes with random weights, and timing."""

import argparse
import copy
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from stillroom.demo import DEMO_MODELS
from stillroom.models.load import LoadedModel, load_tokenizer
from stillroom.models.resolve import ModelLocation

VOCABULARY = 151_936
_QWEN3 = {
    "vocab_size": VOCABULARY, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40_960,
}  # fmt: skip
_QWEN3_5 = {
    "vocab_size": 248_320, "head_dim": 256, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "max_position_embeddings": 262_144,
}  # fmt: skip
SIZES: dict[str, PreTrainedConfig] = {
    "0.6B": Qwen3Config(**_QWEN3, hidden_size=1024, intermediate_size=3072),
    "1.7B": Qwen3Config(**_QWEN3, hidden_size=2048, intermediate_size=6144),
    "3.5-0.8B": Qwen3_5TextConfig(
        **_QWEN3_5, hidden_size=1024, intermediate_size=3584, num_hidden_layers=24,
        num_attention_heads=8, num_key_value_heads=2, linear_num_value_heads=16,
    ),
    "3.5-4B": Qwen3_5TextConfig(
        **_QWEN3_5, hidden_size=2560, intermediate_size=9216, num_hidden_layers=32,
        num_attention_heads=16, num_key_value_heads=4, linear_num_value_heads=32,
    ),
}  # fmt: skip
"""The text models of Qwen3 and Qwen3.5 by their names; Qwen3.5 has three layers of a gated delta
net to each one of full attention."""


def random_model(
    size: str, dtype: torch.dtype, *, seed: int = 0, device: str = "cuda"
) -> PreTrainedModel:
    """Returns a model of a real shape with random weights; the same for the same seed."""
    config = copy.deepcopy(SIZES[size])
    config.update({"tie_word_embeddings": True, "eos_token_id": None, "pad_token_id": 0})
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config).to(dtype).eval()


def loaded(model: Any) -> LoadedModel:
    """Returns the model as the engine holds it; nothing ends a turn but its length."""
    folder = DEMO_MODELS["demo/student"]
    location = ModelLocation("demo/student", str(folder), is_local=True)
    return LoadedModel(location, model, load_tokenizer(location), frozenset())


def random_ids(length: int, rng: random.Random) -> list[int]:
    return [rng.randrange(1000, VOCABULARY) for _ in range(length)]


def skewed_lengths(
    count: int, *, median: int, sigma: float, most: int, rng: random.Random
) -> list[int]:
    """Returns lengths with a long tail, as those of answers are."""
    return [min(most, max(8, int(median * rng.lognormvariate(0, sigma)))) for _ in range(count)]


def timings(run: Callable[[], Any], *, warmup: int, repeats: int) -> list[float]:
    """Returns the seconds of each repeat, after warming up."""
    for _ in range(warmup):
        run()
    seconds: list[float] = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return seconds


def measure(
    run: Callable[[], Any], *, tokens: int, warmup: int = 1, repeats: int = 3, **what: Any
) -> None:
    """Prints a JSON line with tokens per second at the median and the peak of memory."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        seconds = timings(run, warmup=warmup, repeats=repeats)
    # A peer that fails is a result too.
    except Exception as error:
        tell(**what, error=f"{type(error).__name__}: {str(error)[:300]}")
        return
    middle = statistics.median(seconds)
    tell(
        **what,
        tokens=tokens,
        tokens_per_s=round(tokens / middle),
        seconds=round(middle, 3),
        all_seconds=[round(s, 3) for s in seconds],
        peak_gib=gib(torch.cuda.max_memory_allocated()),
        before_gib=gib(before),
    )


def gib(size: int) -> float:
    return round(size / 2**30, 2)


def tell(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def tell_machine() -> None:
    import transformers

    tell(
        gpu=torch.cuda.get_device_name(),
        torch=torch.__version__,
        transformers=transformers.__version__,
    )


def parse_args(peers: Sequence[str], works: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", default="0.6B,1.7B")
    parser.add_argument("--only", default=",".join(peers), help="who is measured, of: %(default)s")
    parser.add_argument("--works", default=",".join(works))
    parser.add_argument("--rows", default="1,64", help="generate.py: %(default)s")
    parser.add_argument("--kinds", default="lora,full", help="train.py: %(default)s")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    args.rows = [int(rows) for rows in args.rows.split(",")]
    args.works, args.kinds = args.works.split(","), args.kinds.split(",")
    args.sizes, args.only = args.sizes.split(","), args.only.split(",")
    return args
