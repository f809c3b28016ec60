"""Several sources of tools as one."""

import pytest

from fakes.tool_sources import DictTools
from fakes.waiting import run_async
from stillroom.errors import InputError
from stillroom.tools.source import CombinedTools, ToolTask, error_result

TASK = ToolTask({})


def test_each_call_goes_to_the_source_of_the_tool() -> None:
    one, other = DictTools({"b": "from one", "c": "too"}), DictTools({"a": "from other"})
    tools = CombinedTools({"tools.py": one, "the shop": other})

    async def main() -> None:
        async with tools.session(TASK) as session:
            assert (await session.call("a", {})).content == "from other"
            assert (await session.call("b", {})).content == "from one"
            unknown = await session.call("d", {})
            assert unknown == error_result("unknown tool 'd'; the tools are: b, c, a")
            assert (one.opened, other.opened, one.closed, other.closed) == (1, 1, 0, 0)

    run_async(main)
    assert [schema["function"]["name"] for schema in tools.schemas] == ["b", "c", "a"]
    assert (one.closed, other.closed) == (1, 1)


def test_an_error_of_a_rollout_closes_all_its_sessions_and_stays_itself() -> None:
    one, other = DictTools({"a": ""}), DictTools({"b": ""})

    async def main() -> None:
        async with CombinedTools({"one": one, "other": other}).session(TASK):
            raise LookupError("out")

    with pytest.raises(LookupError):
        run_async(main)
    assert (one.closed, other.closed) == (1, 1)


def test_state_is_kept_if_any_source_keeps_it() -> None:
    plain, browser = DictTools({"a": ""}), DictTools({"b": ""}, keeps_state=True)

    assert not CombinedTools({"plain": plain}).keeps_state
    assert CombinedTools({"plain": plain, "browser": browser}).keeps_state


def test_a_tool_of_two_sources_is_refused_by_both_their_names() -> None:
    sources = {"tools.py": DictTools({"a": "", "look": ""}), "the shop": DictTools({"look": ""})}

    with pytest.raises(InputError, match=r"'look' is used by both tools\.py and the shop"):
        CombinedTools(sources)
