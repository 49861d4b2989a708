"""Parsing YAML of job files."""

from __future__ import annotations

import re
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-3 as a number (YAML 1.1 requires a dot and a sign). It rejects duplicate keys, of which
    PyYAML would use the last one, and numbers that are not what they look like: 010 is 8 in YAML 1.1, 1:30 is 90."""

    def __init__(self, text: str):
        super().__init__(text)
        self._written = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._written += 1
        if self._written > MAX_WRITTEN_VALUES:
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem=f"it has more than {MAX_WRITTEN_VALUES} values", problem_mark=mark)
        return super().compose_node(parent, index)

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node: yaml.ScalarNode = super().compose_scalar_node(anchor)
        if node.tag in _NUMBERS and len(node.value) > MAX_DIGITS:
            problem = f"a number with {len(node.value)} characters; at most {MAX_DIGITS} are allowed"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.MarkedYAMLError(problem=f"duplicate key {key.value}", problem_mark=key.start_mark)
                seen.add((key.tag, key.value))
        return node

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        text = node.value.lstrip("+-")
        read_as = "in base 60" if ":" in text else "as octal" if _OCTAL.match(text) else None
        if read_as is not None:
            advice = "write it in decimal, without a leading zero, or in quotes if it is a string"
            problem = f"YAML reads {node.value[:40]} {read_as}: {advice}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        is_whole = node.tag == _INT
        number: int | float = self.construct_yaml_int(node) if is_whole else self.construct_yaml_float(node)
        return number


_OCTAL = re.compile(r"0[0-9_]*[0-9]$")
_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
for _tag in (_INT, _FLOAT):
    _Loader.add_constructor(_tag, _Loader.construct_number)

_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
MAX_DIGITS = 1000
"""Maximum length of a number: YAML 1.1 has integers in base 60, whose value takes time that grows with its square, and
Python writes none of more than 4300 digits."""
MAX_WRITTEN_VALUES = 50_000
"""Maximum number of values written in a document, all of which take about two seconds."""
MAX_VALUES = 1_000_000
"""Maximum number of values in a document, with aliases expanded: a few lines of aliases can expand to any number."""


def read_yaml(text: str) -> Any:
    """Parse one document. Raises yaml.YAMLError, or ValueError for an invalid date."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _values_in(node, {}) > MAX_VALUES:
            raise yaml.YAMLError(f"it has more than {MAX_VALUES} values after expanding its aliases")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def line_at(text: str, path: str) -> int | None:
    """Line, from 1, of the key at a dotted path such as `train.steps` in a document, or of the section that lacks it;
    None if that is the whole document. Raises yaml.YAMLError, ValueError."""
    loader, line = _Loader(text), None
    try:
        node = loader.get_single_node()
    finally:
        loader.dispose()
    for part in path.split("."):
        if isinstance(node, yaml.SequenceNode) and part.isdecimal() and int(part) < len(node.value):
            key = node = node.value[int(part)]
        elif isinstance(node, yaml.MappingNode):
            entries = ((key, value) for key, value in node.value if getattr(key, "value", None) == part)
            key, node = next(entries, (None, None))
        else:
            break
        if key is None:
            break
        line = key.start_mark.line + 1
    return line


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
