"""The output file of a rollout run, and the journal from which a killed run resumes.

Each finished model call and tool reply is written to the journal before it is used. A finished
rollout is a row of the output file; until then its steps are in the journal, and a new process
replays them.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from stillroom.errors import InputError
from stillroom.files import AppendLog, cut_torn_line, write_atomic, write_json
from stillroom.outputs import OutputLock
from stillroom.rollout.journal.finished import FinishedRows, finished_rows
from stillroom.rollout.journal.records import (
    CallRecord,
    CriticRecord,
    EpisodeRecorder,
    FinishedRow,
    JournalContent,
    JudgeRecord,
    OutstandingRecord,
    Record,
    RecordedSteps,
    RepliesRecord,
    RestartRecord,
    RolloutKey,
    StepRecord,
    TurnRecord,
    UnconfirmedRecord,
    read_journal,
)
from stillroom.secrecy.commands import without_secrets
from stillroom.teachers.budget import Cost, Outstanding
from stillroom.tools.source import ToolResult
from stillroom.tools.user.file import UserFile
from stillroom.types import CallTotals, SampledTurn, Trajectory

_SYNC_EVERY_S = 1.0
"""Seconds between syncs of the journal to disk. A crash of the machine, unlike one of the process,
can lose the records since the last sync."""
_SETTINGS = "settings.json"
_REWARDS_COPY = "given_rewards.py"
_JUDGING_SETTINGS = {"rewards_sha256", "rewards_modules", "judge", "answer_match"}
"""Settings that change how a rollout is judged, but not the rollout."""
_MAYBE_UNKNOWN = ("weights", "tools_modules", "rewards_modules", "chat_templates")
"""Settings that may be unknown: the commit of a hub model before its download, and in outputs of
older versions the modules of tools.py and rewards.py, and the texts of chat templates."""


def holds_rollouts(path: Path) -> bool:
    """Returns whether a rollout run has written rows to this file."""
    is_started = (journal_folder(path) / _SETTINGS).exists()
    return is_started and path.exists() and path.stat().st_size > 0


def journal_folder(output: Path) -> Path:
    """Returns the folder next to an output file that holds its journal, settings and lock."""
    return output.with_name(f".{output.name}")


def journal_path(output: Path) -> Path:
    """Returns the path of an output file's journal."""
    return journal_folder(output) / "journal.jsonl"


def recorded_settings(output: Path) -> dict[str, Any] | None:
    """Returns the settings that an output was started with; None if no run has started it."""
    path = journal_folder(output) / _SETTINGS
    return msgspec.json.decode(path.read_bytes()) if _is_started(output) and path.exists() else None


def check_settings(output: Path, settings: Mapping[str, Any]) -> None:
    """Raises InputError if an output was started with different settings or by another program."""
    if not _is_started(output):
        return
    path = journal_folder(output) / _SETTINGS
    if not path.exists():
        raise InputError(
            f"{output} exists and was not written by generate_rollouts",
            "choose another output",
        )
    before = msgspec.json.decode(path.read_bytes())
    now = msgspec.json.decode(msgspec.json.encode(settings))
    # Outputs of earlier versions recorded command lines with the secrets in them.
    if before.get("mcp_servers"):
        before["mcp_servers"] = [without_secrets(server) for server in before["mcp_servers"]]
    names = [*now, *(before.keys() - now.keys())]
    unknown = {name for name in _MAYBE_UNKNOWN if before.get(name) is None or now.get(name) is None}
    names = [name for name in names if name not in unknown]
    changed = [name for name in names if before.get(name) != now.get(name)]
    if changed:
        shown = "; ".join(f"{n} was {before.get(n)!r}, now {now.get(n)!r}" for n in changed)
        raise InputError(
            f"{output} was started with different settings: {shown}",
            _rejudging_fix(output, before, changed)
            if _JUDGING_SETTINGS.issuperset(changed)
            else f"resume {output} with the original settings, or choose another output",
        )


def _rejudging_fix(output: Path, before: Mapping[str, Any], changed: Sequence[str]) -> str:
    """Returns the fix of the error when only the judge or the rewards have changed."""
    copy, original = journal_folder(output) / _REWARDS_COPY, "the original judge and rewards"
    if all(name.startswith("rewards") for name in changed):
        if before.get("rewards_sha256") is None:
            original = "rewards=none"
        elif copy.exists():
            original = f"rewards={copy}"
    return (
        f"resume {output} with {original}, then score its rows with the new judge and rewards, "
        f"without calling the teacher: score_rollouts(input={output}, output=<another file>); or "
        "choose another output"
    )


def copy_rewards(output: Path, file: UserFile | None) -> None:
    """Copies rewards.py and its modules next to the journal, to resume with them after edits."""
    copy = journal_folder(output) / _REWARDS_COPY
    if file is not None and not copy.exists():
        for relative_path, code in file.modules.items():
            write_atomic(copy.parent / relative_path, code)
        write_atomic(copy, file.code)


def _is_started(output: Path) -> bool:
    """Returns whether an output or its journal has any content."""
    files = (output, journal_path(output))
    return any(file.exists() and file.stat().st_size > 0 for file in files)


class RolloutStore:
    """The output file of a rollout run with its journal, open in one process at a time.

    `on_call` is called with the record of each new model call, but not of replayed ones.
    Raises InputError if the settings differ from those the file was started with, and DataError if
    the file or its journal is damaged anywhere but in its last line.
    """

    def __init__(
        self,
        output: Path,
        settings: dict[str, Any],
        *,
        on_call: Callable[[CallRecord], None] = lambda _record: None,
    ) -> None:
        self.output, self.on_call = output, on_call
        self._folder = journal_folder(output)
        self._lock = OutputLock(output)
        self._lock.acquire("generate_rollouts")
        journal = journal_path(output)
        try:
            check_settings(output, settings)
            self._is_empty = not _is_started(output)
            if self._is_empty:
                write_json(self._folder / _SETTINGS, settings)
            cut_torn_line(output)
            cut_torn_line(journal)
            self.finished = finished_rows(output)
            self._journal_content = read_journal(journal, self.finished)
            self.recorded_steps = self._journal_content.recorded_steps
            self._unconfirmed = self._journal_content.unconfirmed + self.lost.worst
            self._rows, self._journal = AppendLog(output), AppendLog(journal)
        except BaseException:
            self._lock.release()
            raise
        self._synced_at = time.monotonic()
        self._has_recorded_calls = False
        self.num_restarted = 0
        """The number of rollouts that were restarted because their tools keep state."""

    @property
    def lost_by_last_run(self) -> Outstanding:
        """Upper bound on the calls in flight when the last run was killed; none if it was not."""
        return self._journal_content.outstanding

    @property
    def lost(self) -> Outstanding:
        """Upper bound on the calls in flight when any run was killed, the last run included."""
        return self._journal_content.lost + self._journal_content.outstanding

    def recorder(self, key: RolloutKey) -> EpisodeRecorder:
        """Returns the recorder of one rollout, which also replays its recorded steps."""
        return _StepRecorder(self, key, self.recorded_steps.pop(key, None) or RecordedSteps())

    def append(self, record: Record) -> None:
        """Appends a record to the journal; another thread syncs it at most once a second."""
        self._is_empty = False
        if isinstance(record, UnconfirmedRecord):
            self._unconfirmed = self._unconfirmed + Cost(record.tokens, record.usd)
        self._journal.append(record)
        now = time.monotonic()
        if now - self._synced_at >= _SYNC_EVERY_S:
            self._synced_at = now
            self._journal.sync_soon()

    def finish(self, trajectory: Trajectory) -> None:
        """Appends the row of a finished rollout to the output."""
        self._is_empty = False
        self._rows.append(trajectory)
        self.finished.add(FinishedRow.of(trajectory))

    def record_unconfirmed(self, worst: Cost) -> None:
        """Records the worst-case cost of an interrupted call that may have been billed."""
        self.append(UnconfirmedRecord(tokens=worst.tokens, usd=worst.usd))

    def record_outstanding(self, outstanding: Outstanding) -> None:
        """Records an upper bound on what may be billed if this process is killed now."""
        self._append_outstanding(outstanding, begins=not self._has_recorded_calls)
        self._has_recorded_calls = True

    def record_lost(self, lost: Outstanding) -> None:
        """Records the calls that other processes had in flight when they were killed."""
        self._is_empty = False
        self._unconfirmed = self._unconfirmed + lost.worst
        self._append_outstanding(lost, begins=True)

    def _append_outstanding(self, outstanding: Outstanding, *, begins: bool) -> None:
        tokens, usd = outstanding.worst.tokens, outstanding.worst.usd
        self._journal.append(
            OutstandingRecord(calls=outstanding.calls, tokens=tokens, usd=usd, begins=begins)
        )

    def spent(self) -> Cost:
        """Returns the cost of earlier runs, including calls interrupted by an error or a kill."""
        return spent_on_record(self.finished, self._journal_content) + self.lost_by_last_run.worst

    def paid(self) -> CallTotals:
        """Returns the totals of all recorded calls, including those of unfinished rollouts."""
        paid = sum((row.paid for row in self.finished.rows()), start=CallTotals())
        recorded = self._journal_content.paid
        unfinished = (totals for key, totals in recorded.items() if key not in self.finished)
        return sum(unfinished, start=paid)

    def close(self, *, is_complete: bool) -> None:
        """Closes the files, and deletes the journal if it is no longer needed.

        The cost of interrupted calls stays in the journal, since no row includes it.
        """
        with ExitStack() as closing:
            closing.callback(self._lock.release)
            closing.callback(self._journal.close)
            self._rows.close()
            if self._has_recorded_calls:
                # Shows the next process that no call was in flight when this one ended.
                self.record_outstanding(Outstanding())
            if self._is_empty:
                # Nothing was recorded: without a journal the next run may use other settings.
                self._journal.remove()
            # Steps that no recorder took belong to rollouts that were not requested this time.
            elif is_complete and not self.recorded_steps:
                self._drop_steps()

    def _drop_steps(self) -> None:
        unconfirmed = self._unconfirmed
        if unconfirmed == Cost():
            self._journal.remove()
        else:
            record = UnconfirmedRecord(tokens=unconfirmed.tokens, usd=unconfirmed.usd)
            write_atomic(self._journal.path, msgspec.json.encode(record) + b"\n")


def spent_on_record(finished: FinishedRows, journal: JournalContent) -> Cost:
    """Returns the cost of an output's calls, without those in flight when its last run was killed.

    Where a row and the journal differ, the larger cost counts: rows of older versions may lack
    calls that are in the journal.
    """
    spent = journal.unconfirmed + journal.lost.worst
    for row in finished.rows():
        key, in_row = RolloutKey(row.task_id, row.sample), row.spent
        in_journal = journal.spent.get(key) or journal.spent_on_finished.of(key)
        spent += Cost(max(in_row.tokens, in_journal.tokens), max(in_row.usd, in_journal.usd))
    unfinished = (cost for key, cost in journal.spent.items() if key not in finished)
    return sum(unfinished, start=spent)


class _StepRecorder(EpisodeRecorder):
    """Records the steps of one rollout in the journal, and replays those of earlier runs."""

    def __init__(self, store: RolloutStore, key: RolloutKey, steps: RecordedSteps) -> None:
        self._store, self._steps = store, steps
        self._task_id, self._sample = key

    def recorded_turn(self, index: int) -> SampledTurn | None:
        return self._steps.turns.get(index)

    def recorded_replies(self, index: int) -> list[ToolResult] | None:
        return self._steps.replies.get(index)

    def judge_turns(self) -> list[SampledTurn]:
        return self._steps.judge

    def critic_turns(self) -> list[SampledTurn]:
        return self._steps.critic

    def dropped(self) -> CallTotals:
        return self._steps.dropped

    def start_over(self) -> None:
        self._record(RestartRecord(task_id=self._task_id, sample=self._sample))
        self._store.num_restarted += 1

    def record_replies(self, index: int, replies: list[ToolResult]) -> None:
        self._record(
            RepliesRecord(task_id=self._task_id, sample=self._sample, index=index, replies=replies)
        )

    def record_turn(self, index: int, turn: SampledTurn) -> None:
        self._record_call(TurnRecord, index, turn)

    def record_judge_turn(self, index: int, turn: SampledTurn) -> None:
        self._record_call(JudgeRecord, index, turn)

    def record_critic_turn(self, index: int, turn: SampledTurn) -> None:
        self._record_call(CriticRecord, index, turn)

    def _record_call(self, kind: type[CallRecord], index: int, turn: SampledTurn) -> None:
        record = kind(task_id=self._task_id, sample=self._sample, index=index, turn=turn)
        self._record(record)
        self._store.on_call(record)

    def _record(self, record: StepRecord) -> None:
        self._store.append(record)
        self._steps.add(record)
