"""The folders of a service are marked as its own, where they answer."""

import threading

from manta.service.home import home_of_jobs
from manta.service.home.home_of_jobs import HomeOfJobs


def test_folder_of_checkpoints_that_does_not_answer_keeps_no_service_from_starting(tmp_path, monkeypatch, caplog):
    answers, marked, shared = threading.Event(), [], tmp_path / "shared"

    def mark(folder, installation):
        assert folder != shared or answers.wait(60)
        marked.append(folder)

    def soon_given_up(seconds, name, work):
        return answered_within(0.05 if work.args[0] == shared else 6 * seconds, name, work)

    answered_within = home_of_jobs.answered_within
    monkeypatch.setattr(home_of_jobs, "mark", mark)
    monkeypatch.setattr(home_of_jobs, "answered_within", soon_given_up)
    HomeOfJobs(tmp_path / "home", shared, None).mark("manta-1")
    assert marked == [tmp_path / "home"]
    assert f"{shared} cannot be marked as belonging to this service: no answer" in caplog.text
    answers.set()
