"""What a machine costs that is paid by the hour, and how much of a budget is kept for its end."""

_HOUR_S = 3600.0
_LEAST_RESERVE_S = 60.0
_MOST_OF_BUDGET = 0.25
_SLOW_BYTES_PER_S = 10e6
_COPIES = 3
"""How often a model's bytes are brought back after the stop: weights, and twice as much of the
optimiser's state."""


def machine_usd(price_per_hour: float | None, used_s: float) -> float | None:
    """Returns what a machine has cost that was used for so many seconds; None without a price."""
    return None if price_per_hour is None else price_per_hour * used_s / _HOUR_S


def reserve_s(
    *,
    price_per_hour: float | None,
    budget_usd: float | None,
    model_bytes: int,
    bytes_per_s: float | None,
) -> float:
    """Returns the seconds of the machine to keep for the last checkpoint and bringing it back.

    At most a quarter of what the budget buys; 0 if nothing limits the run's dollars.
    """
    if not price_per_hour or budget_usd is None:
        return 0.0
    copying_s = _COPIES * model_bytes / (bytes_per_s or _SLOW_BYTES_PER_S)
    bought_s = budget_usd / price_per_hour * _HOUR_S
    return min(_LEAST_RESERVE_S + copying_s, _MOST_OF_BUDGET * bought_s)
