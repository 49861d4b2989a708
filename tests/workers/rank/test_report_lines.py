"""What a trainer's engine says becomes reports of its rank and generation."""

import json

from manta.workers.liveness.rank_samples import RankSample, packed
from manta.workers.protocol.messages import LaunchOrder
from manta.workers.protocol.reports import Event, Finished, Message, Metrics, Report
from manta.workers.rank import control_socket as module
from manta.workers.rank.control_socket import report_lines, reports_of

ORDER = LaunchOrder("job-1", 2, 3, {})


def test_rows_that_follow_each_other_are_one_report_and_all_else_keeps_its_time(monkeypatch):
    monkeypatch.setattr(module.time, "time", lambda: 50.0)
    rows = [{"step": step} for step in range(4)]
    messages = [
        Message(Metrics((rows[0],)), 10.0),
        Message(Metrics((rows[1], rows[2])), 11.0),
        Message(Event("told"), 12.0),
        Message(Event("told again"), 13.0),
        Message(Metrics((rows[3],)), 14.0),
        Message(Finished(3), 15.0),
    ]
    assert reports_of(ORDER, messages) == [
        Report(Metrics(tuple(rows[:3])), 2, 3, 50.0),
        Report(Event("told"), 2, 3, 12.0),
        Report(Event("told again"), 2, 3, 13.0),
        Report(Metrics((rows[3],)), 2, 3, 50.0),
        Report(Finished(3), 2, 3, 15.0),
    ]
    assert reports_of(ORDER, []) == []


def test_merged_metric_rows_keep_the_newest_sample_of_all_ranks():
    def metrics(step, sample):
        return Message(Metrics(({"step": step},), sample), 1.0)

    older, newer = (RankSample(step, 0.1, None, packed([1.0])) for step in (1, 2))
    (report,) = reports_of(ORDER, [metrics(1, older), metrics(2, newer), metrics(3, None)])
    assert report.payload == Metrics(({"step": 1}, {"step": 2}, {"step": 3}), newer)
    assert [Report.from_json(json.loads(line)) for line in report_lines([report]).splitlines()] == [report]


def test_reports_are_written_as_one_json_line_each():
    reports = [Report(Event("told", "two\nlines"), 2, 3, 12.0), Report(Finished(3), 2, 3, 15.0)]
    lines = report_lines(reports)
    assert lines.endswith(b"\n")
    assert [Report.from_json(json.loads(line)) for line in lines.splitlines()] == reports
    assert report_lines([]) == b""
