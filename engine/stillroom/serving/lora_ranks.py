"""The ranks of adapters that a vLLM server can be started for."""

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ones vLLM's --max-lora-rank takes."""


def lora_rank(rank: int | None) -> int | None:
    """Returns the smallest rank that vLLM supports and that holds this one, or None."""
    return next((known for known in _RANKS if rank is not None and known >= rank), None)
