"""Events that people read are said once for the whole job."""

from __future__ import annotations

from types import SimpleNamespace

from manta.workers.training.reporter import announce, named_samples, sample_data

SAMPLES = [range(8, 16), range(20, 21)]


def test_announcement_is_made_by_rank_0_alone_in_its_log_and_as_an_event(capsys):
    events = []
    reporter = SimpleNamespace(event=lambda *arguments: events.append(arguments))
    for rank in (0, 1):
        announce(SimpleNamespace(rank=rank), reporter, "spike", 3, "too high", {"a": 1})
    assert events == [("spike", 3, "too high", {"a": 1})]
    assert capsys.readouterr().out == "too high\n"


def test_skipped_samples_are_named_inclusively_in_text_and_half_open_in_data():
    assert named_samples(SAMPLES) == "8 to 15 and 20 to 20"
    assert sample_data(SAMPLES) == {"first_sample": 8, "last_sample": 20, "samples": [[8, 16], [20, 21]]}
