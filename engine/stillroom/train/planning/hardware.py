"""Forecasts a run's time and price on a machine from what is known of it; pure, without torch.

A machine on which the same training has run before goes by its own rate. Any other goes by what
the maker of its GPU publishes, in a wide range: how much of that is reached depends on the model's
size, the batch and the host's processor.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stillroom.types import OthersText, OwnText
from stillroom.yaml_text import read_yaml

_TABLE = Path(__file__).with_name("gpus.yml")
# The lowest shares are those that `benchmarks/gpu` measured (an H200 behind a slow processor, LoRA
# of 0.6B and 1.7B: 35 and 62 TFLOP/s): small models are bound by the start of kernels, large ones
# reach about a fifth. Almost no training reaches more than 45 %.
_MEASURED_FLOPS, _MEASURED_SIZE, _GROWTH = 35e12, 0.6e9, 0.55
_LEAST_SHARE, _MOST_SHARE, _FASTER_HOST = 0.2, 0.45, 4.0
# A decoding step of 28 layers took 8 ms there; the weights are read once in each.
_SLOW_LAYER_S, _FAST_LAYER_S = 3e-4, 5e-5
_CORE_FLOPS = (5e9, 40e9)
"""The fp32 operations a second of a processor's core, from an old one to a new one."""
_LOAD_BYTES_S = (0.3e9, 2e9)
_IMPORT_S = (10.0, 60.0)
_REPEATED = (0.9, 1.15)
"""How much a run's time differs from that of the same training on the same machine before."""
_CONTEXT_GB = 0.7
"""The memory of a GPU that CUDA itself takes."""
_HOUR_S = 3600
_INSTALL_S = (120.0, 600.0)
"""The seconds in which a first start sends the code and installs torch; its network decides."""


@dataclass(frozen=True, slots=True)
class GpuFigures:
    """What its maker publishes of a GPU."""

    flops: float
    """Operations a second of bf16 products; of fp32 where the GPU has no fast bf16."""
    memory_gb: float
    bytes_per_s: float
    has_bf16: bool


@dataclass(frozen=True, slots=True)
class EarlierRate:
    """How fast an earlier run of the same training was on a machine."""

    run_id: str
    tokens_per_s: float
    """Trained tokens a second; of a distillation, sampled ones with all that happens to them."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine on which a training might run, as far as it is known."""

    machine: str
    gpus: Sequence[str] = ()
    """The name of each GPU, as its driver or machines.yml has it."""
    gpu_memory_gb: Sequence[float] = ()
    is_known: bool = True
    """Whether the machine has been probed, or machines.yml says what it has."""
    num_processors: int | None = None
    memory_gb: float | None = None
    free_disk_gb: float | None = None
    price_per_hour: float | None = None
    is_installed: bool = True
    """Whether torch and the rest are on it, so that a run starts at once."""
    measured: EarlierRate | None = None

    @property
    def device(self) -> str:
        """The device that runs train on there: cuda or cpu."""
        return "cuda" if self.gpus else "cpu"

    @property
    def figures(self) -> GpuFigures | None:
        """The published figures of its GPUs; None without a GPU, or for one that is not listed."""
        return gpu_figures(self.gpus[0]) if self.gpus else None

    @property
    def free_memory_gb(self) -> float | None:
        """The memory of one GPU that a run can have, or the main memory; None if not known."""
        if not self.gpus:
            return self.memory_gb
        figures = self.figures
        listed = figures.memory_gb if figures is not None else None
        memory = min(self.gpu_memory_gb) if self.gpu_memory_gb else listed
        return memory - _CONTEXT_GB if memory is not None else None

    @property
    def words(self) -> str:
        """The GPUs or processors, in words."""
        if self.gpus:
            return f"{len(self.gpus)} x {self.gpus[0]}" if len(self.gpus) > 1 else self.gpus[0]
        if not self.is_known:
            return "hardware not known yet"
        return f"no GPU, {self.num_processors or '?'} processors"


@dataclass(frozen=True, slots=True)
class Work:
    """What a run has to compute, which is the same on every machine."""

    learning_flops: float
    """Operations of the passes with gradients, and of those that read (DPO's reference, teachers,
    held-out rows)."""
    counted_tokens: float
    """The tokens that a run's `tokens_per_s` counts: trained ones, or sampled ones (distill)."""
    num_parameters: int
    """The parameters that one token passes, so only the chosen experts of a mixture."""
    num_layers: int
    load_bytes: int
    """The weights of student and teachers, which are loaded before the first step."""
    sampled_tokens: float = 0.0
    rows_at_once: int = 1
    """How many rollouts are sampled at once."""
    num_processes: int = 1


class MachineForecast(msgspec.Struct, frozen=True, kw_only=True):
    """The time and price of a run on one machine."""

    machine: str
    computes: OthersText
    """Its GPUs or processors."""
    fits: bool | None
    """Whether the run fits into its memory; None if that is not known."""
    memory_gb: float
    memory_free_gb: float | None
    seconds_least: float | None
    seconds_most: float | None
    """The time of the run from its process's start; None if nothing is known of the machine."""
    price_per_hour: float | None
    usd_least: float | None
    usd_most: float | None
    based_on: OwnText
    """The measurement or estimate behind the time and the price."""
    install_seconds: float = 0.0
    """The most that the first start takes to install torch and the rest; the price includes it."""


def forecast_on(
    hardware: Hardware, work: Work, *, need_gb: float, fits: bool | None
) -> MachineForecast:
    """Returns the time and price of a run on a machine."""
    span, based_on = _seconds(hardware, work)
    price = hardware.price_per_hour
    install = (0.0, 0.0) if hardware.is_installed else _INSTALL_S
    usd = None
    if span is not None and price is not None:
        usd = [(s + first) * price / _HOUR_S for s, first in zip(span, install, strict=True)]
    return MachineForecast(
        machine=hardware.machine,
        computes=hardware.words,
        fits=fits,
        memory_gb=need_gb,
        memory_free_gb=hardware.free_memory_gb,
        seconds_least=span[0] if span else None,
        seconds_most=span[1] if span else None,
        price_per_hour=price,
        usd_least=usd[0] if usd else None,
        usd_most=usd[1] if usd else None,
        based_on=based_on,
        install_seconds=install[1],
    )


def sums_on_machines(forecasts: Sequence[Sequence[MachineForecast]]) -> list[MachineForecast]:
    """Returns for each machine the forecast of several runs, one after another.

    Its memory is that of the run that needs most.
    """
    return [_one_after_another(runs) for runs in zip(*forecasts, strict=True)]


def _one_after_another(runs: Sequence[MachineForecast]) -> MachineForecast:
    def total(name: str) -> float | None:
        values: list[float | None] = [getattr(run, name) for run in runs]
        known = [value for value in values if value is not None]
        return sum(known) if len(known) == len(runs) else None

    def usd(name: str, install_s: float) -> float | None:
        """Returns the sum, with the installation counted once."""
        price, value = runs[0].price_per_hour, total(name)
        if value is None or price is None or not runs[0].install_seconds:
            return value
        return value - (len(runs) - 1) * install_s * price / _HOUR_S

    return msgspec.structs.replace(
        max(runs, key=lambda run: run.memory_gb),
        fits=None if any(run.fits is None for run in runs) else all(run.fits for run in runs),
        seconds_least=total("seconds_least"),
        seconds_most=total("seconds_most"),
        usd_least=usd("usd_least", _INSTALL_S[0]),
        usd_most=usd("usd_most", _INSTALL_S[1]),
    )


def _seconds(hardware: Hardware, work: Work) -> tuple[tuple[float, float] | None, str]:
    """Returns the least and the most seconds of a run, and what they rest on."""
    loads = sorted(work.load_bytes / rate for rate in _LOAD_BYTES_S)
    starts = [import_s + load_s for import_s, load_s in zip(_IMPORT_S, loads, strict=True)]
    if (measured := hardware.measured) is not None:
        seconds = work.counted_tokens / measured.tokens_per_s
        span = (
            starts[0] + _REPEATED[0] * seconds,
            starts[1] + _REPEATED[1] * seconds,
        )
        return span, (
            f"{measured.run_id}, the same training there before: {measured.tokens_per_s:.0f} "
            "tokens a second"
        )
    rates = _rates(hardware, work)
    if rates is None:
        reason = "its GPU is not in our table" if hardware.gpus else "it has not been probed yet"
        return None, f"nothing: {reason}"
    learning, sampling = rates
    most, least = (
        work.learning_flops / flops + work.sampled_tokens / tokens_per_s
        for flops, tokens_per_s in zip(learning, sampling, strict=True)
    )
    source = "its processors" if not hardware.gpus else f"its maker's figures ({table_date()})"
    return (starts[0] + least, starts[1] + most), source


def _rates(
    hardware: Hardware, work: Work
) -> tuple[tuple[float, float], tuple[float, float]] | None:
    """Returns the lowest and highest operations a second of learning, and tokens of sampling."""
    forward = 2.0 * work.num_parameters
    if not hardware.gpus:
        if not hardware.num_processors:
            return None
        low, high = (rate * hardware.num_processors for rate in _CORE_FLOPS)
        return (low, high), (low / forward, high / forward)
    figures = hardware.figures
    if figures is None:
        return None
    num = max(1, min(work.num_processes, len(hardware.gpus)))
    low, high = learning_flops(figures, work.num_parameters)
    weights = 2.0 * work.num_parameters / figures.bytes_per_s
    rows = max(1, work.rows_at_once // num)
    steps_s = [work.num_layers * layer_s + weights for layer_s in (_SLOW_LAYER_S, _FAST_LAYER_S)]
    slow, fast = (num * rows / step_s for step_s in steps_s)
    most = num * high / forward
    return (num * low, num * high), (min(slow, most), min(fast, most))


def learning_flops(figures: GpuFigures, num_parameters: int) -> tuple[float, float]:
    """Returns the lowest and highest operations a second that training of a model may reach."""
    started = _MEASURED_FLOPS * (num_parameters / _MEASURED_SIZE) ** _GROWTH
    low = min(_LEAST_SHARE * figures.flops, started)
    return low, max(low, min(_MOST_SHARE * figures.flops, _FASTER_HOST * started))


def gpu_figures(name: str) -> GpuFigures | None:
    """Returns the published figures of a GPU by its name; None if it is not in the table."""
    words = set(re.findall(r"[a-z0-9]+", name.lower().replace("rtx", " ").replace("tesla", " ")))
    entries: list[dict[str, Any]] = _table()["gpus"]
    for entry in entries:
        if words.issuperset(entry["words"]):
            return GpuFigures(
                flops=entry["tflops"] * 1e12,
                memory_gb=entry["memory_gb"],
                bytes_per_s=entry["tb_per_s"] * 1e12,
                has_bf16=not entry.get("no_bf16", False),
            )
    return None


def table_date() -> str:
    """Returns the day on which the published figures were collected."""
    return str(_table()["as_of"])


@functools.cache
def _table() -> Mapping[str, Any]:
    return read_yaml(_TABLE.read_text(encoding="utf-8"))
