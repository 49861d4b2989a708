"""Templates come from anybody: they can do nothing but make text, and not for ever."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys

import pytest

from manta.workers.data import chat_template
from manta.workers.data.chat_template import ChatTemplate, TemplateFailed
from manta.workers.errors import DataError

MESSAGES = [{"role": "user", "content": "<b>ü"}]


def render(source: str, **tokens: str) -> str:
    return ChatTemplate(source, tuple(tokens.items())).render(MESSAGES)[0]


def test_templates_can_use_the_filters_loops_and_variables_of_transformers():
    assert render("{{ bos_token }}{{ messages | tojson }}", bos_token="<s>") == (
        '<s>[{"role": "user", "content": "<b>ü"}]'
    )
    assert render("{% for n in range(9) %}{% if n == 3 %}{% break %}{% endif %}{{ n }}{% endfor %}") == "012"
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc", "trim_blocks, lstrip_blocks"
    assert render("{{ add_generation_prompt }} {{ tools is none }} {{ pad_token is defined }}") == "False True False"


def test_date_in_a_template_is_the_same_on_every_day():
    assert render("{{ strftime_now('%d %b %Y') }}") == "26 Jul 2024"


def test_generation_blocks_are_found_inside_macros_and_set_blocks():
    source = (
        "{% macro said(text) %}({% generation %}{{ text }}{% endgeneration %}){% endmacro %}"
        "é{{ said('one') }}{% set kept %}{% generation %}two{% endgeneration %}{% endset %} {{ kept }}"
        "{% generation %}{% endgeneration %}"
    )
    text, spans = ChatTemplate(source).render(MESSAGES)
    assert text == "é(one) two"
    assert [text[a:b] for a, b in spans] == ["one", "two"]
    assert ChatTemplate(source).marks_answers
    assert not ChatTemplate("{{ generation }}").marks_answers


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_template_that_reaches_beyond_the_conversation_fails(source):
    with pytest.raises(TemplateFailed):
        assert not render(source)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{% for %}", "line 1: not a chat template in Jinja ("),
        ("a\n{% generation %}", "line 2: not a chat template in Jinja ("),
        ("{{ x | no_such_filter }}", "No filter named 'no_such_filter'"),
        ("{{" + "(" * 5000 + ")" * 5000 + "}}", "not a chat template in Jinja ("),
    ],
)
def test_invalid_template_is_refused_with_its_name_and_problem(source, problem):
    with pytest.raises(DataError) as error:
        ChatTemplate(source, name="my.jinja").check()
    assert str(error.value).startswith("my.jinja")
    assert problem in str(error.value)


def test_failing_chat_template_reports_the_error_of_its_expression():
    with pytest.raises(TemplateFailed, match="'dict object' has no attribute 'name'"):
        render("{{ messages[0].name.first }}")
    with pytest.raises(TemplateFailed, match="division by zero"):
        render("{{ 1 / 0 }}")


def test_chat_template_that_loops_for_ever_is_ended_after_its_time_limit(monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 0.2)
    for_ever = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(TemplateFailed, match=r"it is not done after 0 seconds of computing"):
        render(for_ever)
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{{ 'x' * 10000 }}{% endfor %}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ 'x' | center(10 ** 10) }}",
        "{% set s = namespace(x='x') %}{% for n in range(60) %}{% set s.x = s.x ~ s.x %}{% endfor %}",
    ],
)
def test_a_template_that_wants_gigabytes_is_ended(monkeypatch, source):
    monkeypatch.setattr(chat_template, "MEMORY_BYTES", 2**28)
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(TemplateFailed, match=r"it takes too much memory|it writes more than 67108864 characters"):
        render(source)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 * 2**20, "in KiB"


def test_checking_a_template_evaluates_none_of_its_expressions():
    ChatTemplate("{{ 'x' * 10 ** 11 }}{% set a = 'x' * 10 ** 11 %}{{ 'x' | center(10 ** 11) }}").check()


def test_template_operation_that_cannot_be_interrupted_ends_with_its_process():
    program = (
        "from manta.workers.data import chat_template\n"
        "chat_template.SECONDS, chat_template.LAST_SECONDS = 99.0, 0.3\n"
        "from manta.workers.data.chat_template import ChatTemplate\n"
        "ChatTemplate('{{ 9 ** (9 ** 9) }}').render([])"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=60, check=False, capture_output=True)
    assert done.returncode == -signal.SIGVTALRM


def test_stored_template_reads_back_equal_and_its_digest_ignores_its_name():
    template = ChatTemplate("{{ bos_token }}", (("bos_token", "<s>"),), "x")
    assert ChatTemplate.of_document(template.as_document()) == template
    digests = {
        each.digest
        for each in (template, ChatTemplate("{{ bos_token }}"), ChatTemplate("a"), ChatTemplate("a", (), "b"))
    }
    assert len(digests) == 3, "the source and what it is told count, not where it came from"
