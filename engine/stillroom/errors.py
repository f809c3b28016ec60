"""The errors of the engine; each says what failed, where, and what to do next."""

from enum import StrEnum
from typing import Any, cast

_MAX_CHARACTERS = 4000


def writable_text(text: str) -> str:
    """Returns a text that can be encoded as UTF-8 and JSON, shortened if it is long."""
    text = text.encode("utf-8", errors="backslashreplace").decode("utf-8")
    if len(text) <= _MAX_CHARACTERS:
        return text
    half = _MAX_CHARACTERS // 2
    return f"{text[:half]} … ({len(text) - 2 * half} characters left out) … {text[-half:]}"


def noun_for(num: int, noun: str) -> str:
    """Returns the form of a regular noun after a number: `task` after 1, else `tasks`."""
    return noun if num == 1 else f"{noun}s"


class EngineError(Exception):
    """An error that the caller can act on: `problem` is what failed, `fix` is what to do about it.

    Both are positional arguments of Exception, so that the error can be pickled. Long texts, which
    may quote files or responses, are shortened.
    """

    def __init__(self, problem: str, fix: str) -> None:
        problem, fix = writable_text(problem), writable_text(fix)
        super().__init__(problem, fix)
        self.problem, self.fix = problem, fix

    def __str__(self) -> str:
        return f"{self.problem}\nfix: {self.fix}"


class InputError(EngineError):
    """A request is invalid: an argument is wrong, a file is missing, or a path is not allowed."""


class DocumentError(InputError):
    """A file that a request names, such as judge.yml, is malformed; the error may quote it."""


class ConfigError(EngineError):
    """A config.yml, or an override of it, is invalid or requests something unsupported."""


class DataError(EngineError):
    """A data file contains something that cannot be used."""


class ModelError(EngineError):
    """A model, tokenizer or chat template cannot be loaded or used as requested."""


class TeacherError(EngineError):
    """A teacher cannot be used at all, e.g. because its key is wrong or its model is unknown.

    If a single call fails, CallFailedError is raised instead.
    """


class ToolFileError(EngineError):
    """The user's tools.py or rewards.py cannot be loaded."""


class RunError(EngineError):
    """A run does not exist, is owned by another process, or cannot be changed as requested."""


class DivergedError(EngineError):
    """Training diverged: the loss or another number is no longer finite."""


class MissingExtraError(EngineError):
    """An optional part of stillroom is not installed."""


class FailureClass(StrEnum):
    """The kind of infrastructure failure that ended a rollout; a bad answer is not a failure."""

    BAD_REQUEST = "bad_request"
    BAD_RESPONSE = "bad_response"
    CONNECTION = "connection"
    INTERNAL = "internal"
    RATE_LIMIT = "rate_limit"
    REPLAY = "replay"
    """A tool's reply to a recorded call of the student differs from the recorded reply."""
    REWARD = "reward"
    REWARD_TIMEOUT = "reward_timeout"
    ROLLOUT_TIMEOUT = "rollout_timeout"
    SERVER_ERROR = "server_error"
    TIMEOUT = "timeout"
    TOOL_HOST = "tool_host"

    @property
    def is_reward_failure(self) -> bool:
        """Whether only the reward failed, so that the complete conversation can be scored again."""
        return self in (FailureClass.REWARD, FailureClass.REWARD_TIMEOUT)

    @classmethod
    def of(cls, error: Any) -> "FailureClass | None":
        """Returns the class of a rollout's `error` field; None if the field is None.

        If the field names no known class, it is INTERNAL.
        """
        if error is None:
            return None
        name = cast("dict[str, Any]", error).get("class") if isinstance(error, dict) else None
        return next((kind for kind in cls if kind == name), cls.INTERNAL)


class CallFailedError(Exception):
    """One call to a teacher, tool host or reward failed, which ends its rollout but not the run."""

    def __init__(self, kind: FailureClass, message: str) -> None:
        super().__init__(kind, message)
        self.kind, self.message = kind, message

    def __str__(self) -> str:
        return self.message


class RunCancelledError(Exception):
    """Raised to end a run after a request to stop it.

    It is not an EngineError, since there is nothing to fix. `result` is the run's result so far, if
    any.
    """

    def __init__(self, result: object = None) -> None:
        super().__init__(result)
        self.result = result


def missing_extra(extra: str, feature: str) -> MissingExtraError:
    """Returns the error for a missing extra; its fix is the command that installs the extra."""
    return MissingExtraError(
        f"{feature} needs the optional dependencies [{extra}], which are not installed",
        f"run `pip install 'stillroom[{extra}]'` in the environment that runs stillroom",
    )


def leaf_of(error: BaseException | None) -> BaseException | None:
    """Returns the first error inside nested exception groups, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
