"""What the GPU benchmarks share: models of real shapes with random weights, and timing.

With `--tiny` all runs on any machine in seconds, with tiny models and few tokens: that shows that
the scripts work, and its figures say nothing.
"""

import argparse
import copy
import json
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from stillroom.models import probe
from stillroom.models.kernels import KernelChoice
from stillroom.models.load import LoadedModel, load_tokenizer
from stillroom.models.placement import best_device
from stillroom.models.resolve import ModelLocation

_QWEN3 = {
    "vocab_size": 151_936, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
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
_TINY = {
    "vocab_size": 1024, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 4096,
}  # fmt: skip
_TINY_SIZES: dict[str, PreTrainedConfig] = {
    "tiny": Qwen3Config(**_TINY, num_hidden_layers=2),
    "3.5-tiny": Qwen3_5TextConfig(
        **_TINY, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
}  # fmt: skip
_TEACHERS = {"0.6B": "1.7B", "1.7B": "1.7B", "3.5-0.8B": "3.5-4B", "3.5-4B": "3.5-4B"}


@dataclass
class Scale:
    """How much work there is; `--tiny` makes all of it small."""

    sizes: dict[str, PreTrainedConfig]
    length: float = 1.0
    """The factor of all lengths in tokens."""
    count: float = 1.0
    """The factor of all numbers of rows and answers."""

    def tokens(self, number: int) -> int:
        return max(4, int(number * self.length))

    def rows(self, number: int) -> int:
        return max(2, int(number * self.count)) if number > 1 else number


SCALE = Scale(SIZES)


def become_tiny() -> None:
    SCALE.sizes, SCALE.length, SCALE.count = _TINY_SIZES, 1 / 32, 1 / 16


def teacher_of(size: str) -> str:
    return _TEACHERS.get(size, size)


def random_model(
    size: str, dtype: torch.dtype, *, seed: int = 0, device: torch.device | None = None
) -> PreTrainedModel:
    """Returns a model of a real shape with random weights; the same for the same seed."""
    config = copy.deepcopy(SCALE.sizes[size])
    config.update({"tie_word_embeddings": True, "eos_token_id": None, "pad_token_id": 0})
    torch.manual_seed(seed)
    with device or best_device():
        return AutoModelForCausalLM.from_config(config).to(dtype).eval()


def loaded(model: Any) -> LoadedModel:
    """Returns the model as the engine holds it; nothing ends a turn but its length."""
    folder = DEMO_MODELS["demo/student"]
    location = ModelLocation("demo/student", str(folder), is_local=True)
    return LoadedModel(location, model, load_tokenizer(location), frozenset())


def random_ids(length: int, rng: random.Random) -> list[int]:
    # The demo's tokenizer has no more tokens than the smallest vocabulary.
    most = min(config.vocab_size for config in SCALE.sizes.values())
    return [rng.randrange(most // 2, most) for _ in range(length)]


def skewed_lengths(
    count: int, *, median: int, sigma: float, most: int, rng: random.Random
) -> list[int]:
    """Returns lengths with a long tail, as those of answers are."""
    lengths = [min(most, max(8, int(median * rng.lognormvariate(0, sigma)))) for _ in range(count)]
    return [max(8, SCALE.tokens(length)) for length in lengths]


@contextmanager
def packed_by(way: str) -> Iterator[None]:
    """Lets models run rows as `way` says: auto, padded, or packed by a kernel (spans, varlen)."""
    if way == "auto":
        yield
        return
    original = probe.choose_kernel
    kernel = None if way == "padded" else way
    probe.choose_kernel = lambda *_: KernelChoice(kernel)
    try:
        yield
    finally:
        probe.choose_kernel = original


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def forget_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float | None:
    """Returns the most memory of the GPU since `forget_peak`; None without one."""
    return gib(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else None


def timings(run: Callable[[], Any], *, warmup: int, repeats: int) -> list[float]:
    """Returns the seconds of each repeat, after warming up."""
    for _ in range(warmup):
        run()
    seconds: list[float] = []
    for _ in range(repeats):
        synchronize()
        begin = time.perf_counter()
        run()
        synchronize()
        seconds.append(time.perf_counter() - begin)
    return seconds


def measure(
    run: Callable[[], Any], *, tokens: int, warmup: int = 1, repeats: int = 3, **what: Any
) -> None:
    """Prints a JSON line with tokens per second at the median and the peak of memory."""
    forget_peak()
    before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
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
        peak_gib=peak_gib(),
        before_gib=gib(before),
    )


def gib(size: int) -> float:
    return round(size / 2**30, 2)


def tell(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def tell_machine() -> None:
    import transformers

    tell(
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        device=best_device().type,
        is_tiny=SCALE.length < 1,
        torch=torch.__version__,
        transformers=transformers.__version__,
    )


def parse_args(
    given: Iterable[str] | None, peers: Sequence[str], works: Sequence[str]
) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true", help="tiny models and few tokens, anywhere")
    parser.add_argument("--sizes", help=f"default: 0.6B,1.7B; known: {','.join(SIZES)}")
    parser.add_argument("--only", default=",".join(peers), help="who is measured, of: %(default)s")
    parser.add_argument("--works", default=",".join(works))
    parser.add_argument("--rows", default="1,64", help="generate.py: %(default)s")
    parser.add_argument("--kinds", default="lora,full", help="train.py: %(default)s")
    parser.add_argument(
        "--ways", default="auto", help="train.py, how our rows run, of: auto,padded,spans,varlen"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args(given if given is None else list(given))
    if args.tiny:
        become_tiny()
    args.sizes = args.sizes or ("tiny" if args.tiny else "0.6B,1.7B")
    args.ways = args.ways.split(",")
    args.rows = [int(rows) for rows in args.rows.split(",")]
    args.works, args.kinds = args.works.split(","), args.kinds.split(",")
    args.sizes, args.only = args.sizes.split(","), args.only.split(",")
    return args
