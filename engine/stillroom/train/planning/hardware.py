"""Forecasts a run's time and price from a machine's known hardware; pure, without torch.

A machine that has run the same training before is forecast from that run's speed. Any other is
forecast from its GPU's published figures, as a wide range: the fraction reached depends on the
model's size, the batch and the host's CPU.
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
# The lower fractions were measured by `benchmarks/gpu` (an H200 with a slow CPU, LoRA of 0.6B and
# 1.7B: 35 and 62 TFLOP/s): small models are bound by kernel launches, large ones reach about a
# fifth. Training rarely reaches more than 45 %.
_MEASURED_FLOPS, _MEASURED_SIZE, _GROWTH = 35e12, 0.6e9, 0.55
_MIN_SHARE, _MAX_SHARE, _FASTER_HOST = 0.2, 0.45, 4.0
# A decoding step of 28 layers took 8 ms on that machine; it reads all weights once.
_SLOW_LAYER_S, _FAST_LAYER_S = 3e-4, 5e-5
_CORE_FLOPS = (5e9, 40e9)
"""The fp32 operations per second of a CPU core, from old to new."""
_LOAD_BYTES_S = (0.3e9, 2e9)
_IMPORT_S = (10.0, 60.0)
_REPEATED = (0.9, 1.15)
"""The relative range of a run's time around that of the same training on the same machine."""
_CONTEXT_GB = 0.7
"""The GPU memory that the CUDA context takes (GB)."""
_HOUR_S = 3600
_INSTALL_S = (120.0, 600.0)
"""The seconds in which a first start sends the code and installs torch; depends on its network."""


@dataclass(frozen=True, slots=True)
class GpuFigures:
    """The published figures of a GPU."""

    flops: float
    """Operations per second of bf16 matrix products; of fp32 on a GPU without fast bf16."""
    memory_gb: float
    bytes_per_s: float
    has_bf16: bool


@dataclass(frozen=True, slots=True)
class EarlierRate:
    """The speed of an earlier run of the same training on a machine."""

    run_id: str
    tokens_per_s: float
    """Trained tokens per second; for distillation, sampled tokens, with scoring and training."""
    other_s: float | None = None
    """The run's seconds outside its steps: imports, loading, saving; None if it did not finish."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine that could train, as far as its hardware is known."""

    machine: str
    gpus: Sequence[str] = ()
    """The name of each GPU, from its driver or machines.yml."""
    gpu_memory_gb: Sequence[float] = ()
    is_known: bool = True
    """Whether the machine was probed, or its hardware is in machines.yml."""
    num_processors: int | None = None
    memory_gb: float | None = None
    free_disk_gb: float | None = None
    price_per_hour: float | None = None
    is_installed: bool = True
    """Whether the packages that a run needs are installed, so that it starts immediately."""
    measured: EarlierRate | None = None

    @property
    def device(self) -> str:
        """The device that runs use on it: cuda or cpu."""
        return "cuda" if self.gpus else "cpu"

    @property
    def figures(self) -> GpuFigures | None:
        """The published figures of its GPUs; None without a GPU, or for one not in the table."""
        return gpu_figures(self.gpus[0]) if self.gpus else None

    @property
    def free_memory_gb(self) -> float | None:
        """The available memory of one GPU, or the CPU memory; None if unknown."""
        if not self.gpus:
            return self.memory_gb
        figures = self.figures
        listed = figures.memory_gb if figures is not None else None
        memory = min(self.gpu_memory_gb) if self.gpu_memory_gb else listed
        return memory - _CONTEXT_GB if memory is not None else None

    @property
    def description(self) -> str:
        """The GPUs or processors, as text."""
        if self.gpus:
            return f"{len(self.gpus)} x {self.gpus[0]}" if len(self.gpus) > 1 else self.gpus[0]
        if not self.is_known:
            return "hardware not known yet"
        return f"no GPU, {self.num_processors or '?'} processors"


@dataclass(frozen=True, slots=True)
class Work:
    """The computation of a run, independent of the machine."""

    learning_flops: float
    """Operations of the passes with gradients, and of forward passes for DPO's reference, teachers
    and held-out rows."""
    counted_tokens: float
    """The tokens counted in a run's `tokens_per_s`: trained ones, or sampled ones (distill)."""
    num_parameters: int
    """The parameters active for one token: of a mixture's experts only the chosen ones."""
    num_layers: int
    load_bytes: int
    """The bytes of the student's and teachers' weights, loaded before the first step."""
    sampled_tokens: float = 0.0
    rows_at_once: int = 1
    """The number of rollouts sampled concurrently."""
    num_processes: int = 1


class MachineForecast(msgspec.Struct, frozen=True, kw_only=True):
    """The time and price of a run on one machine."""

    machine: str
    computes: OthersText
    """Its GPUs or processors."""
    fits: bool | None
    """Whether the run fits into its memory; None if unknown."""
    memory_gb: float
    memory_free_gb: float | None
    seconds_least: float | None
    """The lower estimate of the time from the start of the run's process, without installation and
    transfers; None if nothing is known of the machine."""
    seconds_most: float | None
    """The upper estimate of that time."""
    price_per_hour: float | None
    usd_least: float | None
    usd_most: float | None
    """The upper estimate of the price, which includes the installation of packages."""
    based_on: OwnText
    """The measurement or estimate behind the time and the price."""
    install_seconds: float = 0.0
    """The upper estimate for installing packages, if they are not there; the price includes it."""


def forecast_on(
    hardware: Hardware,
    work: Work,
    *,
    need_gb: float,
    fits: bool | None,
    most: Work | None = None,
) -> MachineForecast:
    """Returns the time and price of a run on a machine.

    most: the computation for the upper estimate; None: `work` is for both estimates.
    """
    span, based_on = _seconds(hardware, work)
    longest, _ = _seconds(hardware, most or work)
    if span is not None and longest is not None:
        span = (span[0], longest[1])
    price = hardware.price_per_hour
    install = (0.0, 0.0) if hardware.is_installed else _INSTALL_S
    usd = None
    if span is not None and price is not None:
        usd = [(s + extra_s) * price / _HOUR_S for s, extra_s in zip(span, install, strict=True)]
    return MachineForecast(
        machine=hardware.machine,
        computes=hardware.description,
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


def forecast_sequence(forecasts: Sequence[Sequence[MachineForecast]]) -> list[MachineForecast]:
    """Returns each machine's forecast of several runs in sequence; `forecasts` has a list per run.

    The memory is the maximum over the runs.
    """
    return [_sum_forecasts(runs) for runs in zip(*forecasts, strict=True)]


def _sum_forecasts(runs: Sequence[MachineForecast]) -> MachineForecast:
    def total(name: str) -> float | None:
        values: list[float | None] = [getattr(run, name) for run in runs]
        numbers = [value for value in values if value is not None]
        return sum(numbers) if len(numbers) == len(runs) else None

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
    """Returns the minimum and maximum seconds of a run, and the basis of the estimate."""
    loads = sorted(work.load_bytes / rate for rate in _LOAD_BYTES_S)
    starts = [import_s + load_s for import_s, load_s in zip(_IMPORT_S, loads, strict=True)]
    if (measured := hardware.measured) is not None:
        seconds = work.counted_tokens / measured.tokens_per_s
        if measured.other_s is not None:
            starts = [share * measured.other_s for share in _REPEATED]
        span = (
            starts[0] + _REPEATED[0] * seconds,
            starts[1] + _REPEATED[1] * seconds,
        )
        return span, (
            f"{measured.run_id}, the same training on {hardware.machine}: "
            f"{measured.tokens_per_s:.0f} tokens per second"
        )
    rates = _rates(hardware, work)
    if rates is None:
        reason = (
            "its GPU is not in the table of published figures"
            if hardware.gpus
            else "it has not been probed yet"
        )
        return None, f"nothing: {reason}"
    learning, sampling = rates
    most, least = (
        work.learning_flops / flops + work.sampled_tokens / tokens_per_s
        for flops, tokens_per_s in zip(learning, sampling, strict=True)
    )
    source = (
        "its processors" if not hardware.gpus else f"specifications of its GPU ({table_date()})"
    )
    return (starts[0] + least, starts[1] + most), source


def _rates(
    hardware: Hardware, work: Work
) -> tuple[tuple[float, float], tuple[float, float]] | None:
    """Returns the ranges of operations/s in training and of tokens/s in sampling."""
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
    """Returns the range of operations per second that training of a model may reach."""
    reached = _MEASURED_FLOPS * (num_parameters / _MEASURED_SIZE) ** _GROWTH
    low = min(_MIN_SHARE * figures.flops, reached)
    return low, max(low, min(_MAX_SHARE * figures.flops, _FASTER_HOST * reached))


def gpu_figures(name: str) -> GpuFigures | None:
    """Returns the published figures of a GPU by name; None if it is not in the table."""
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
    """Returns the date of the published figures."""
    return str(_table()["as_of"])


@functools.cache
def _table() -> Mapping[str, Any]:
    return read_yaml(_TABLE.read_text(encoding="utf-8"))
