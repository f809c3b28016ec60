"""Tokens per second of sampling, ours beside transformers' own.

    python benchmarks/gpu/generate.py [--sizes 0.6B,1.7B,3.5-0.8B,3.5-4B] [--rows 1,64]
        [--only ours,eager,dynamic,static,continuous] [--tiny]

`eager` is ours without CUDA graphs.

Prompts and lengths of answers are drawn once and are the same for all. `even`: every answer has
256 tokens. `skewed`: answers have a long tail, as real ones do; a static batch runs to its longest,
and only tokens that were asked for count. Everybody samples at temperature 1 from the same weights.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from shapes import (
    SCALE,
    loaded,
    measure,
    parse_args,
    random_ids,
    random_model,
    skewed_lengths,
    synchronize,
    tell_machine,
)

from stillroom.models.placement import best_device
from stillroom.policy import decode
from stillroom.policy.decode import DecodeEngine
from stillroom.policy.sequences import DecodedSequence
from stillroom.types import SamplingSettings

PEERS = ("ours", "eager", "dynamic", "static", "continuous")
MAX_CONTEXT = 2048


@dataclass(frozen=True)
class Workload:
    """What is to be answered, and how many tokens each answer has."""

    name: str
    rows: int
    prompts: list[list[int]]
    lengths: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def workloads() -> list[Workload]:
    rng = random.Random(0)
    found: list[Workload] = []

    def prompts_of(count: int) -> list[list[int]]:
        lengths = [SCALE.tokens(rng.randrange(64, 320)) for _ in range(count)]
        return [random_ids(length, rng) for length in lengths]

    for rows in (1, 64):
        count = SCALE.rows(rows)
        found.append(Workload("even", rows, prompts_of(count), [SCALE.tokens(256)] * count))
    prompts = prompts_of(SCALE.rows(128))
    lengths = skewed_lengths(len(prompts), median=128, sigma=0.8, most=512, rng=rng)
    found.append(Workload("skewed", 64, prompts, lengths))
    return found


def ours(model: Any, work: Workload) -> None:
    engine = DecodeEngine(loaded(model), max_rows=SCALE.rows(work.rows), max_context=MAX_CONTEXT)
    for index, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True)):
        settings = SamplingSettings(temperature=1.0, max_tokens=length)
        sequence = DecodedSequence(settings, rng=random.Random(index))
        sequence.append_given(prompt)
        engine.request_turn(sequence)
    while engine.has_work:
        for sequence in engine.step():
            engine.release(sequence)


def eager(model: Any, work: Workload) -> None:
    original = decode.recorder_for
    decode.recorder_for = lambda _device: None
    try:
        ours(model, work)
    finally:
        decode.recorder_for = original


def generated(model: Any, work: Workload, **options: Any) -> None:
    """transformers' generate, one batch of rows after the other."""
    for start in range(0, len(work.prompts), work.rows):
        batch = work.prompts[start : start + work.rows]
        num_new = max(work.lengths[start : start + work.rows])
        ids, mask = padded_left(batch)
        model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            pad_token_id=0,
            **options,
        )


def padded_left(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return ids.to(best_device()), mask.to(best_device())


def continuous(model: Any, work: Workload) -> None:
    """transformers' continuous batching over a paged cache; each answer leaves when it is done."""
    from transformers import GenerationConfig

    config = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=max(work.lengths), eos_token_id=-1, pad_token_id=0
    )
    with model.continuous_batching_context_manager(
        generation_config=config, persistent_manager=True
    ) as manager:
        for prompt, length in zip(work.prompts, work.lengths, strict=True):
            manager.add_request(prompt, max_new_tokens=length)
        left = len(work.prompts)
        while left:
            answer = manager.get_result(timeout=60)
            if answer is None or answer.error:
                raise RuntimeError(f"continuous batching gave up: {answer and answer.error}")
            left -= bool(answer.is_finished())


def run(peer: str, size: str, work: Workload, repeats: int) -> None:
    model = random_model(size, torch.bfloat16)
    what = {"bench": "generate", "who": peer, "size": size, "work": work.name, "rows": work.rows}
    runs = {
        "ours": lambda: ours(model, work),
        "eager": lambda: eager(model, work),
        "dynamic": lambda: generated(model, work),
        "static": lambda: generated(model, work, cache_implementation="static"),
        "continuous": lambda: continuous(model, work),
    }
    measure(runs[peer], tokens=work.tokens, repeats=repeats, **what, dtype="bf16")


def profile(size: str) -> None:
    """Prints where the time of 40 steps goes."""
    model = random_model(size, torch.bfloat16)
    rng = random.Random(0)
    work = Workload("even", 64, [random_ids(200, rng) for _ in range(64)], [40] * 64)
    ours(model, work)
    with torch.profiler.profile() as found:
        ours(model, work)
        synchronize()
    for key in ("self_cpu_time_total", "self_device_time_total"):
        print(found.key_averages().table(sort_by=key, row_limit=18, max_name_column_width=60))


def main(given: Sequence[str] | None = None) -> None:
    args = parse_args(given, PEERS, ("even", "skewed"))
    tell_machine()
    for size in args.sizes:
        if args.profile:
            profile(size)
        for work in workloads():
            for peer in args.only if work.name in args.works and work.rows in args.rows else ():
                run(peer, size, work, args.repeats)


if __name__ == "__main__":
    main()
