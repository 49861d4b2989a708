"""YAML as users write it in job files."""

from __future__ import annotations

import re
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-3 as a number, as people mean it (YAML 1.1 asks for a dot and a sign), and refuses a key
    that is there twice, of which it would take the last one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value} is there twice", problem_mark=key.start_mark
                    )
                seen.add((key.tag, key.value))
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


MOST_VALUES = 1_000_000
"""In a document, with each alias counted as what it stands for: a few lines of them can stand for any number."""


def read_yaml(text: str) -> Any:
    """Parse one document. Raises yaml.YAMLError, or ValueError for a date that is none."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _values_in(node, {}) > MOST_VALUES:
            raise yaml.YAMLError(f"its aliases make it more than {MOST_VALUES} values long")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _values_in(node: yaml.Node, known: dict[yaml.Node, int | None]) -> int:
    """Number of values in what `node` stands for; those of nodes that were counted before are `known`, and None for
    those that are being counted."""
    if node not in known:
        known[node] = None
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        each = (part for entry in parts for part in (entry if isinstance(entry, tuple) else (entry,)))
        known[node] = 1 + sum(_values_in(part, known) for part in each)
    count = known[node]
    if count is None:
        raise yaml.MarkedYAMLError(problem="it contains itself", problem_mark=node.start_mark)
    return count
