"""The moments at which a process of ours may be killed while it talks with a scripted service."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class KilledError(BaseException):
    """Stands for a SIGKILL of our process: nothing of ours may catch it."""


@dataclass
class Moments:
    """The moments of a scripted life at which it may end, in order."""

    kill_at: int | None = None
    passed: int = 0

    def pass_by(self) -> None:
        """Ends this life if it is the moment for it."""
        self.passed += 1
        if self.passed == self.kill_at:
            raise KilledError

    @contextmanager
    def around(self) -> Iterator[None]:
        """A call that may be cut off before it arrives, or after it was done."""
        self.pass_by()
        yield
        self.pass_by()
