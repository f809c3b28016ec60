"""Checks what a machine has: this one, or one that machines.yml names."""

from stillroom.projects.setup import CheckSetup, SetupReport
from stillroom.projects.setup import check_setup as check_this_machine
from stillroom.remote.machine_checks import check_machine
from stillroom.settings import Workspace


def check_setup(workspace: Workspace, request: CheckSetup) -> SetupReport:
    """Returns what this machine has and lacks, or with `where` what that machine does."""
    if request.where is None:
        return check_this_machine(workspace, request)
    return check_machine(workspace, request, request.where)
