"""Time and price of a run on a machine, from published figures or from an earlier run there."""

import dataclasses

import pytest

from stillroom.train.planning.hardware import (
    Hardware,
    Work,
    forecast_on,
    forecast_sequence,
    gpu_figures,
    learning_flops,
)

SMALL = Work(
    learning_flops=2 * 0.6e9 * 2 * 10e6,
    counted_tokens=4e6,
    num_parameters=600_000_000,
    num_layers=28,
    load_bytes=1_200_000_000,
)
H100 = Hardware("box", gpus=["NVIDIA H100 80GB HBM3"], gpu_memory_gb=[79.6], price_per_hour=2.4)


@pytest.mark.parametrize(
    ("name", "tflops", "memory_gb"),
    [
        ("NVIDIA H100 80GB HBM3", 989, 80),
        ("NVIDIA H100 PCIe", 756, 80),
        ("NVIDIA A100-SXM4-80GB", 312, 80),
        ("A100", 312, 40),
        ("NVIDIA A10G", 70, 24),
        ("NVIDIA A10", 125, 24),
        ("NVIDIA RTX A4000", 77, 16),
        ("NVIDIA A40", 150, 48),
        ("RTX4090", 165, 24),
        ("Tesla T4", 8.1, 16),
    ],
)
def test_a_gpu_is_found_by_the_names_that_drivers_and_providers_give_it(name, tflops, memory_gb):
    figures = gpu_figures(name)

    assert figures is not None
    assert figures.flops == pytest.approx(tflops * 1e12)
    assert figures.memory_gb == memory_gb


@pytest.mark.parametrize("name", ["NVIDIA GeForce GTX 1060", "AMD Instinct MI300X", ""])
def test_a_gpu_that_is_not_in_the_table_has_no_figures(name):
    assert gpu_figures(name) is None


def test_the_range_holds_what_was_measured_on_a_real_gpu():
    h200 = gpu_figures("NVIDIA H200")
    assert h200 is not None
    # Tokens a second of SFT with LoRA, as benchmarks/gpu/README.md has them.
    for parameters, measured in ((0.6e9, 14_728), (1.7e9, 9_157)):
        low, high = (flops / (4 * parameters) for flops in learning_flops(h200, parameters))
        assert 0.95 * low <= measured <= high


@pytest.mark.parametrize("name", ["H200", "L4", "T4"])
@pytest.mark.parametrize("parameters", [1e8, 7e10])
def test_no_gpu_is_said_to_reach_half_of_what_its_maker_publishes(name, parameters):
    figures = gpu_figures(name)
    assert figures is not None
    low, high = learning_flops(figures, parameters)

    assert 0 < low <= high < figures.flops / 2


def test_a_forecast_says_time_dollars_and_what_they_rest_on():
    found = forecast_on(H100, SMALL, need_gb=20.0, fits=True)

    assert found.seconds_least is not None
    assert found.seconds_most is not None
    assert 60 < found.seconds_least < found.seconds_most < 3600
    assert found.usd_most == pytest.approx(found.seconds_most / 3600 * 2.4)
    assert "published" not in found.based_on
    assert "specifications of its GPU (2026-" in found.based_on
    assert found.memory_free_gb == pytest.approx(78.9)


def test_the_price_of_a_first_run_includes_the_installation():
    new = dataclasses.replace(H100, is_installed=False)
    ready, first = (forecast_on(each, SMALL, need_gb=20.0, fits=True) for each in (H100, new))

    assert ready.install_seconds == 0
    assert first.install_seconds == 600
    assert first.seconds_most == ready.seconds_most
    assert first.usd_most == pytest.approx(ready.usd_most + 2.4 / 6)
    [both] = forecast_sequence([[first], [first]])
    assert both.usd_most == pytest.approx(2 * ready.usd_most + 2.4 / 6)


@pytest.mark.parametrize(
    ("hardware", "said"),
    [
        (Hardware("box", is_known=False), "it has not been probed yet"),
        (Hardware("box", gpus=["Odd GPU 9"]), "not in the table"),
    ],
)
def test_of_an_unknown_machine_nothing_is_made_up(hardware, said):
    found = forecast_on(hardware, SMALL, need_gb=20.0, fits=None)

    assert (found.seconds_least, found.seconds_most, found.usd_most) == (None, None, None)
    assert said in found.based_on


def test_more_gpus_shorten_a_run_of_as_many_processes_and_of_no_fewer():
    many = Hardware("box", gpus=["H100"] * 8)
    alone = forecast_on(many, SMALL, need_gb=1.0, fits=True).seconds_most
    shared = Work(
        learning_flops=SMALL.learning_flops,
        counted_tokens=SMALL.counted_tokens,
        num_parameters=SMALL.num_parameters,
        num_layers=SMALL.num_layers,
        load_bytes=SMALL.load_bytes,
        num_processes=8,
    )
    together = forecast_on(many, shared, need_gb=1.0, fits=True).seconds_most
    one = forecast_on(Hardware("box", gpus=["H100"]), shared, need_gb=1.0, fits=True).seconds_most

    assert alone is not None
    assert together is not None
    assert together < alone / 3
    assert one == alone


def test_the_forecasts_of_runs_one_after_another_add_up():
    unknown = forecast_on(Hardware("b", is_known=False), SMALL, need_gb=1.0, fits=None)
    short = forecast_on(H100, SMALL, need_gb=20.0, fits=True)
    large = forecast_on(H100, SMALL, need_gb=90.0, fits=False)

    first, second = forecast_sequence([[short, unknown], [large, unknown]])

    assert short.usd_most is not None
    assert first.usd_most == pytest.approx(2 * short.usd_most)
    assert (first.memory_gb, first.fits) == (90.0, False)
    assert second.seconds_most is None
