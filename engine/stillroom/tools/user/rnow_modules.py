"""Serves `from rnow.core import tool, reward` and the like from our own names.

Projects that were written for rnow import their decorators from its package. Their files run here
unchanged: its modules are made of ours, even where rnow itself is installed.
"""

import sys
from collections.abc import Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

from stillroom.errors import ToolFileError

_PACKAGE = "rnow"
_JUDGE = "llm_judge"
_OFFERED = {
    "rnow": (),
    "rnow.core": ("tool", "reward", "ToolArgs", "RewardArgs", "get_response"),
    "rnow.core.tool": ("tool", "ToolArgs"),
    "rnow.core.reward": ("reward", "RewardArgs"),
    "rnow.core.llm_judge": (),
    "rnow.models": ("ToolArgs", "RewardArgs", "get_response"),
}
"""The names that each module of rnow offers here."""


class RnowModules(MetaPathFinder, Loader):
    """Finds rnow's modules, which offer the given names of ours."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names
        self.is_used = False
        """Whether a file has imported rnow."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Returns the specification of rnow's package, or None for a module of somebody else.

        Raises ToolFileError for a module of rnow that is not offered here.
        """
        if fullname == _PACKAGE:
            self.is_used = True
            return spec_from_loader(fullname, self, is_package=True)
        if fullname.startswith(f"{_PACKAGE}."):
            raise ToolFileError(
                f"it imports {fullname}, which is not offered here",
                f"tools.py and rewards.py may import {', '.join(_OFFERED)}",
            )
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns the package, with all its modules in it.

        They are all made at once: a module that is imported later would be put into `rnow.core` in
        place of the decorator of the same name.
        """
        modules = {name: _module(name, offered, self._names) for name, offered in _OFFERED.items()}
        sys.modules.update(modules)
        modules[_PACKAGE].__dict__.update(core=modules["rnow.core"], models=modules["rnow.models"])
        return modules[_PACKAGE]

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing, since the module is made whole."""


def _module(name: str, offered: tuple[str, ...], ours: Mapping[str, Any]) -> ModuleType:
    module = ModuleType(name, "A module of rnow, made of stillroom's names.")

    def missing(wanted: str) -> Any:
        if wanted == _JUDGE:
            raise ToolFileError(
                "it imports llm_judge, whose calls no budget would count and no key would reach",
                "write the question as a rubric into judge.yml, give it as `judge`, and name "
                "'judge' in the rows' rewards (skill rollout-rewards)",
            )
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        raise ToolFileError(
            f"it imports {wanted} from {name}, which is not offered here",
            f"{name} offers {', '.join(offered) or 'nothing'}",
        )

    module.__dict__.update({each: ours[each] for each in offered}, __getattr__=missing)
    if name in (_PACKAGE, "rnow.core"):
        module.__path__ = []
    return module
