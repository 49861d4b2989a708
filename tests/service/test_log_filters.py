"""Lines by stream, text, expression and level."""

import pytest

from manta.service.logs.filters import InvalidPattern, LogFilter, level_of


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("WARNING:root:disk is nearly full", "warning"), ("2026-01-01 10:00 ERROR trainer: no", "error"),
        ("[W1126 02:22:00.5 socket.cpp:752] [c10d] The client socket", "warning"), ("[rank0]:[E1126 02:22 x", "error"),
        ("ValueError: bad", "error"), ("torch.cuda.OutOfMemoryError: no", "error"), ("UserWarning: old", "warning"),
        ("DEBUG a", "debug"), ("FATAL", "critical"), ("step 5 loss 2.3", None), ("no error here", None), ("", None),
        ("x" * 200 + " ERROR", None), ("  raise ValueError", None), ("INFORMATION", None),
    ],
)  # fmt: skip
def test_log_level_is_read_from_the_line(text, level):
    assert level_of(text) == level


@pytest.mark.parametrize(
    ("wanted", "stream", "text", "yes"),
    [
        (LogFilter("stderr"), "stderr", "x", True), (LogFilter("stderr"), "stdout", "x", False),
        (LogFilter(search="LoSs"), "stdout", "the loss", True), (LogFilter(search="loss"), "stdout", "los", False),
        (LogFilter(regex="^a+$"), "stdout", "aaa", True), (LogFilter(regex="^a+$"), "stdout", "aab", False),
        (LogFilter(regex="(?i)é+$"), "stdout", "CAFÉÉ", True), (LogFilter(regex="b$"), "stdout", "\ud800b", True),
        (LogFilter(level="warning"), "stdout", "ERROR x", True), (LogFilter(level="error"), "stdout", "WARN x", False),
        (LogFilter(level="debug"), "stdout", "says nothing", False),
        (LogFilter("stderr", "b", "a", "info"), "stderr", "INFO a b", True),
        (LogFilter("stderr", "b", "a", "info"), "stderr", "INFO a c", False),
    ],
)  # fmt: skip
def test_log_filter_conditions_must_all_hold(wanted, stream, text, yes):
    assert wanted.test().wants(stream, text) is yes


@pytest.mark.parametrize(
    ("regex", "why"),
    [("(a", r"missing \): \(a"), (r"(a)\1", "invalid escape"), ("a" * 501, "longer than 500"), ("\ud800", "half"),
     ("(a{100}){100}", "invalid repetition")],
)  # fmt: skip
def test_log_filter_refuses_invalid_or_oversized_patterns(regex, why):
    with pytest.raises(InvalidPattern, match=why):
        LogFilter(regex=regex).test()


def test_log_filter_patterns_take_linear_time():
    assert not LogFilter(regex="(a*)*b|((a+)+)+$z").test().wants("stdout", "a" * 8192)


def test_log_filter_without_conditions_tests_nothing():
    assert LogFilter().test() is None


@pytest.mark.parametrize(
    ("search", "line", "may"),
    [
        ("loss", b'{"text": "no LOSS"}', True), ("loss", b'{"text": "x"}', False), ("a\"b", b'{"text": "x"}', True),
        ("é", b'{"text": "x"}', True), ("a\\b", b"{}", True), (None, b"{}", True),
    ],
)  # fmt: skip
def test_log_filter_byte_check_never_drops_a_matching_line(search, line, may):
    assert LogFilter("stdout", search).test().may_want(line) is may
