"""Rules across the fields of a JobSpec about conversations. Pure Python.

Each rule is a function of the spec that yields problems, as in `rules.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from workers.config import CHATML, JobSpec
from workers.spec.problems import Problem


def _only_chat_has_answers(spec: JobSpec) -> Iterator[Problem]:
    data = spec.data
    if _has_conversations(spec):
        return
    if data.template is not None:
        problem = f"source {data.source} does not use a template; only source chat does"
        yield Problem("data.template", problem, "null")
    if data.loss == "answers":
        problem = f"source {data.source} has no answers; only source chat does"
        yield Problem("data.loss", problem, "all")


def _template_is_known(spec: JobSpec) -> Iterator[Problem]:
    data = spec.data
    if _has_conversations(spec) and data.template is None and data.tokenizer_file is None:
        problem = f"conversations need a chat template, and the {data.tokenizer} tokenizer has none"
        yield Problem("data.template", problem, CHATML)
    if data.template is not None and ("\0" in data.template or not data.template.strip()):
        yield Problem("data.template", "a path cannot be blank or contain a zero byte", CHATML)


def _has_conversations(spec: JobSpec) -> bool:
    return any(each.source == "chat" for each in spec.data.corpora)


CHAT_RULES = (
    _only_chat_has_answers,
    _template_is_known,
)
