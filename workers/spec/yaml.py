"""Parsing YAML of job files."""

from __future__ import annotations

import re
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-3 as a number (YAML 1.1 requires a dot and a sign), and rejects duplicate keys, of which
    PyYAML would use the last one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.MarkedYAMLError(problem=f"duplicate key {key.value}", problem_mark=key.start_mark)
                seen.add((key.tag, key.value))
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


MOST_VALUES = 1_000_000
"""Maximum number of values in a document, with aliases expanded: a few lines of aliases can expand to any number."""


def read_yaml(text: str) -> Any:
    """Parse one document. Raises yaml.YAMLError, or ValueError for an invalid date."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _values_in(node, {}) > MOST_VALUES:
            raise yaml.YAMLError(f"it has more than {MOST_VALUES} values after expanding its aliases")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _values_in(node: yaml.Node, known: dict[yaml.Node, int | None]) -> int:
    """Number of values in `node`, with aliases expanded. `known` has the numbers of nodes counted before, and None for
    nodes being counted."""
    if node not in known:
        known[node] = None
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        each = (part for entry in parts for part in (entry if isinstance(entry, tuple) else (entry,)))
        known[node] = 1 + sum(_values_in(part, known) for part in each)
    count = known[node]
    if count is None:
        raise yaml.MarkedYAMLError(problem="it contains itself", problem_mark=node.start_mark)
    return count
