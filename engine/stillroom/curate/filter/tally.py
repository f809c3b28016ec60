"""What came into a filter and what went out: counts and distributions."""

from collections import Counter
from pathlib import Path

from stillroom.curate.convert import MAX_EXAMPLES
from stillroom.curate.filter.distributions import Histogram
from stillroom.curate.filter.request import Distributions, FilterDataset, FilterResult
from stillroom.curate.filter.rows import Row
from stillroom.curate.filter.rules import num_tokens
from stillroom.curate.filter.sets import Reasons
from stillroom.data.chat.render import ChatRenderer
from stillroom.settings import Workspace

_MAX_CATEGORIES = 50
_OTHERS = "(others)"
_MOST_WAITING = 4096


class Measured:
    """How some rows are distributed."""

    def __init__(self) -> None:
        self._reward, self._turns = Histogram(), Histogram()
        self._characters, self._tokens = Histogram(), Histogram()
        self._categories: Counter[str] = Counter()
        # What is not counted yet.
        self._new_turns, self._new_characters = list[int](), list[int]()
        self._new_rewards, self._new_tokens = list[float](), list[int]()

    def joined(self, other: "Measured") -> "Measured":
        """Returns how the rows of both are distributed."""
        self._count()
        other._count()
        both = Measured()
        both._reward = self._reward.joined(other._reward)
        both._turns = self._turns.joined(other._turns)
        both._characters = self._characters.joined(other._characters)
        both._tokens = self._tokens.joined(other._tokens)
        both._categories = self._categories + other._categories
        return both

    def add(self, row: Row, category: str) -> None:
        """Takes in a row."""
        self._categories[category] += 1
        facts = row.facts
        if facts is None:
            return
        self._new_turns.append(facts.num_turns)
        self._new_characters.append(len(row.line.line.view))
        if facts.reward is not None:
            self._new_rewards.append(facts.reward)
        if row.num_tokens is not None:
            self._new_tokens.append(row.num_tokens)
        if len(self._new_turns) == _MOST_WAITING:
            self._count()

    def _count(self) -> None:
        for histogram, values in (
            (self._turns, self._new_turns),
            (self._characters, self._new_characters),
            (self._reward, self._new_rewards),
            (self._tokens, self._new_tokens),
        ):
            histogram.add(values)
            values.clear()

    @property
    def num_rows(self) -> int:
        """All that were taken in."""
        return self._categories.total()

    def distributions(self) -> Distributions:
        """Returns the distributions of what was taken in."""
        self._count()
        return Distributions(
            reward=self._reward.quantiles(),
            turns=self._turns.quantiles(),
            characters=self._characters.quantiles(),
            tokens=self._tokens.quantiles(),
        )

    def categories(self) -> dict[str, int]:
        """Returns the counts by name; of many the largest, and the others together."""
        if len(self._categories) <= _MAX_CATEGORIES:
            return dict(sorted(self._categories.items()))
        largest = dict(self._categories.most_common(_MAX_CATEGORIES))
        return {**largest, _OTHERS: self._categories.total() - sum(largest.values())}


class Tally:
    """What came in and what went out."""

    def __init__(self, request: FilterDataset) -> None:
        self._category_field = request.category_field
        self._are_ids_needed = bool(request.verdicts)
        self._kept_rows, self._dropped_rows = Measured(), Measured()
        self._success_derived = 0
        self._dropped: Counter[str] = Counter()
        self._problems: list[str] = []
        self._ids: set[str] = set()

    @property
    def read(self) -> int:
        """Rows that came in."""
        return self._kept_rows.num_rows + self._dropped_rows.num_rows

    @property
    def kept(self) -> int:
        """Rows that went out."""
        return self._kept_rows.num_rows

    def add(self, row: Row, reasons: Reasons, renderer: ChatRenderer | None) -> None:
        """Takes in a row with the reasons to drop it; with a renderer its tokens are counted."""
        facts = row.facts
        if facts is not None:
            if facts.success is None:
                self._success_derived += 1
            if renderer is not None:
                num_tokens(row, renderer)
        category = row.category(self._category_field)
        if self._are_ids_needed and row.review_id:
            self._ids.add(row.review_id)
        if not reasons:
            self._kept_rows.add(row, category)
            return
        self._dropped_rows.add(row, category)
        self._dropped[reasons[0].text] += 1
        if facts is None and row.line.problem and len(self._problems) < MAX_EXAMPLES:
            self._problems.append(f"{row.line.where}: {row.line.problem}")

    def take(self, other: "Tally") -> None:
        """Takes in what another one has counted of rows that come later."""
        self._success_derived += other._success_derived
        self._kept_rows = self._kept_rows.joined(other._kept_rows)
        self._dropped_rows = self._dropped_rows.joined(other._dropped_rows)
        self._dropped.update(other._dropped)
        self._problems += other._problems[: MAX_EXAMPLES - len(self._problems)]
        self._ids |= other._ids

    def result(
        self, workspace: Workspace, output: Path, dropped_file: Path, verdicts: set[str]
    ) -> FilterResult:
        """Returns what all rows came to."""
        if unmatched := len(verdicts - self._ids):
            self._problems.append(f"{unmatched} of {len(verdicts)} verdicts name no row by its id")
        before, after = self._kept_rows.joined(self._dropped_rows), self._kept_rows
        return FilterResult(
            output=workspace.shown(output),
            read=self.read,
            kept=self.kept,
            dropped=dict(self._dropped),
            dropped_file=workspace.shown(dropped_file),
            before=before.distributions(),
            after=after.distributions(),
            categories_before=before.categories(),
            categories_after=after.categories(),
            success_derived=self._success_derived,
            problems=self._problems,
        )
