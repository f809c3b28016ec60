"""Reads untrusted YAML within limits.

A YAML alias repeats a whole value, so a few lines can expand to billions of values, and code that
prints or checks them would not finish.
"""

from itertools import chain
from typing import Any

import yaml

from stillroom import bounds

_MAX_EXPANDED = bounds.YAML_VALUES.limit
"""The maximum size of a text with its aliases expanded: its values plus their characters."""


def read_yaml(text: str | bytes) -> Any:
    """Returns the value of a YAML text.

    Raises yaml.YAMLError if the text is malformed or too large, and ValueError for a date that does
    not exist.
    """
    if len(text) > bounds.YAML.limit:
        raise yaml.MarkedYAMLError(problem=f"it is longer than {bounds.YAML.size}")
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _check_size(root, {})
        return loader.construct_document(root)
    except RecursionError as error:
        raise yaml.MarkedYAMLError(problem="its values are nested too deeply") from error
    finally:
        loader.dispose()


def _check_size(node: yaml.Node, sizes: dict[int, int | None]) -> int:
    """Returns the size of a node with its aliases expanded; `sizes` caches the sizes of nodes.

    Raises YAMLError if the size is too large, or if the node contains itself.
    """
    known_size = sizes.get(id(node), 0)
    if known_size is None:
        raise yaml.MarkedYAMLError(problem="a value contains itself", problem_mark=node.start_mark)
    if known_size:
        return known_size
    sizes[id(node)] = None
    size = 1
    if isinstance(node, yaml.ScalarNode):
        size += len(node.value)
    else:
        parts = node.value if isinstance(node, yaml.SequenceNode) else chain(*node.value)
        size += sum(_check_size(part, sizes) for part in parts)
    if size > _MAX_EXPANDED:
        problem = f"its aliases expand to more than {_MAX_EXPANDED} values"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    sizes[id(node)] = size
    return size
