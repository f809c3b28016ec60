"""Whether a run could spend without a limit, so that a person can be asked before it begins."""

from urllib.parse import urlsplit

import msgspec
from pydantic import BaseModel

from stillroom.evaluate.request import EvaluateModel, plan_evaluation
from stillroom.rollout.request import GenerateRollouts, plan_generation
from stillroom.secrecy.keys import is_loopback
from stillroom.settings import Workspace
from stillroom.teachers.providers import Endpoint


class UnlimitedSpending(msgspec.Struct, frozen=True):
    """A run that calls an endpoint beyond this machine, and has no budget."""

    model: str
    host: str


def unlimited_spending(workspace: Workspace, request: BaseModel) -> UnlimitedSpending | None:
    """Returns what a request would spend on without a limit; None if it has one or spends nothing.

    Raises an EngineError if the request is faulty, so that nobody is asked in vain.
    """
    if not isinstance(request, GenerateRollouts | EvaluateModel):
        return None
    if request.dry_run or request.budget_usd is not None:
        return None
    if isinstance(request, GenerateRollouts):
        policy = plan_generation(workspace, request).rollouts.policy
    else:
        policy = plan_evaluation(workspace, request).rollouts.policy
    if not isinstance(policy, Endpoint) or policy.profile.is_local:
        return None
    host = urlsplit(policy.base_url).hostname or ""
    return None if is_loopback(host) else UnlimitedSpending(str(request.model), host)
