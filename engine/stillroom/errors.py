"""One family of errors: each says what failed, where, and what to do next."""

from enum import StrEnum


class EngineError(Exception):
    """Something the caller can act on. Positional args keep it picklable across processes."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem, fix)
        self.problem, self.fix = problem, fix

    def __str__(self) -> str:
        return f"{self.problem}\nfix: {self.fix}"


class InputError(EngineError):
    """A request cannot be carried out: a wrong argument, a missing file, a path not allowed."""


class ConfigError(EngineError):
    """A config.yml (or an override of it) is wrong or asks for what is not supported."""


class DataError(EngineError):
    """A data file holds something that cannot be used."""


class ModelError(EngineError):
    """A model, tokenizer or chat template cannot be loaded or used as requested."""


class TeacherError(EngineError):
    """A teacher cannot be used at all (wrong key, unknown model), as opposed to one failed call."""


class ToolFileError(EngineError):
    """The user's tools.py or rewards.py cannot be loaded."""


class RunError(EngineError):
    """A run does not exist, is owned by another process, or cannot be changed as requested."""


class DivergedError(EngineError):
    """Training produced numbers that are not finite."""


class MissingExtraError(EngineError):
    """An optional part of stillroom is not installed."""


class FailureClass(StrEnum):
    """What made a rollout fail: infrastructure, never the quality of an answer."""

    BAD_REQUEST = "bad_request"
    BAD_RESPONSE = "bad_response"
    CONNECTION = "connection"
    INTERNAL = "internal"
    RATE_LIMIT = "rate_limit"
    REWARD = "reward"
    REWARD_TIMEOUT = "reward_timeout"
    ROLLOUT_TIMEOUT = "rollout_timeout"
    SERVER_ERROR = "server_error"
    TIMEOUT = "timeout"
    TOOL_HOST = "tool_host"


class CallFailedError(Exception):
    """One call to a teacher, tool host or reward failed; it ends its rollout, never the run."""

    def __init__(self, kind: FailureClass, message: str) -> None:
        super().__init__(kind, message)
        self.kind, self.message = kind, message

    def __str__(self) -> str:
        return self.message


class RunCancelledError(Exception):
    """Raised inside a run that is to be cancelled; it never stands for a mistake of the user.

    `result` is the run's result up to then, if it has one.
    """

    def __init__(self, result: object = None) -> None:
        super().__init__(result)
        self.result = result


def missing_extra(extra: str, feature: str) -> MissingExtraError:
    """Returns the error that says which command installs the extra that a feature needs."""
    return MissingExtraError(
        f"{feature} needs the optional dependencies [{extra}], which are not installed",
        f"run `pip install 'stillroom[{extra}]'` in the environment that runs stillroom",
    )
