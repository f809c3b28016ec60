"""Which of a user's functions answer at once, as far as can be told from their last answers."""

QUICK_S = 0.005
SLOW_S = 0.05
_PROVEN = 8
_DISTRUSTED = 1000
AHEAD = 8
"""So many calls of such functions a worker may have at once."""


class QuickCalls:
    """Learns it. One call that is slow, or never answered, is held against a function for long."""

    def __init__(self) -> None:
        self._num_quick: dict[str, int] = {}
        """Quick answers in a row, less those that are owed."""

    def __contains__(self, name: str) -> bool:
        return self._num_quick.get(name, 0) >= _PROVEN

    def note(self, name: str, seconds: float) -> None:
        """Learns how long a call took; inf where it had no answer."""
        before = self._num_quick.get(name, 0)
        if seconds < QUICK_S:
            self._num_quick[name] = before + 1
        else:
            self._num_quick[name] = min(before, 0 if seconds < SLOW_S else -_DISTRUSTED)
