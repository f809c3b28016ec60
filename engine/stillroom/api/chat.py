"""Chatting with a model: as it was trained, unless the request says otherwise."""

from stillroom.errors import EngineError
from stillroom.export.folder import read_export
from stillroom.export.history import read_history
from stillroom.models.resolve import adapter_base, locate_model
from stillroom.rollout.chat import ChatWithModel, Conversation, open_chat
from stillroom.settings import Workspace
from stillroom.teachers.providers import IN_PROCESS

__all__ = ["ChatWithModel", "Conversation", "as_trained", "open_chat"]


def as_trained(workspace: Workspace, request: ChatWithModel) -> ChatWithModel:
    """Returns the request with the system message of most training rows, if it names none.

    Nothing changes for a model without a record of its training, or with a row to begin with.
    """
    if request.provider not in IN_PROCESS or request.system is not None or request.data is not None:
        return request
    try:
        location = locate_model(workspace, request.model)
        if location.is_local and (export := read_export(location.folder)) is not None:
            location = locate_model(workspace, export.run_id or request.model)
        base = adapter_base(workspace, location) if location.is_adapter else None
        trained = read_history(workspace, location, base).conversation
    except EngineError:
        return request  # opening the chat says what is wrong with the model
    if trained is None or trained.system is None:
        return request
    return request.model_copy(update={"system": trained.system})
