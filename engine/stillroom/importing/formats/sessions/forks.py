"""The order of sessions of which some were forked from others."""

from collections.abc import Mapping

MOST_FORKS = 64
"""The most sessions of which each was forked from the one before."""


def line_of(session: str, origins: Mapping[str, str]) -> list[str]:
    """Returns a session, the one that it was forked from, and so on to the first known one."""
    line = [session]
    while (origin := origins.get(line[-1])) and origin not in line and len(line) < MOST_FORKS:
        line.append(origin)
    return line
