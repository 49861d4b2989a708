"""Which metrics a query names: a reader of as much PromQL as that takes."""

import re

_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"')
_MATCHERS, _RANGE = re.compile(r"\{[^{}]*\}"), re.compile(r"\[[^\[\]]*\]")
_LABELS = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^()]*\)")
_WORD = re.compile(r"(?<![\w.:])[a-zA-Z_:][\w:]*(?!\w*\s*\()")
_KEYWORDS = {"and", "or", "unless", "bool", "offset"}


def metric_names(expression: str) -> set[str]:
    """All metrics of a query: what is neither a label, a function, a keyword nor a number."""
    for noise in (_QUOTED, _MATCHERS, _RANGE, _LABELS):
        expression = noise.sub(" ", expression)
    return {word for word in _WORD.findall(expression) if word not in _KEYWORDS}
