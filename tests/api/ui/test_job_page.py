"""A job's page follows its job, through the real API, and offers what can be done with it."""

from api.ui.job_page import JobPage
from service.states import JobState
from service.store import events, jobs
from tests.api.ui.test_polling import report


def test_restart_is_marked_though_no_point_has_come_since(service, watch):
    job_id = service.submit()["id"]

    def curve(page, done):
        line = page._loss.options["series"][0]
        return len(line["data"]), [mark["xAxis"] for mark in line["markLine"]["data"]]

    def restart():
        service.store.write(
            lambda session: events.append(session, job_id, "state_changed", "", step=2, data={"to": "RECOVERING"})
        )

    seen = watch(
        lambda viewer: JobPage(viewer, job_id),
        curve,
        lambda: report(service, job_id, [{"step": step, "loss": 3.0 - step} for step in (1, 2)]),
        restart,
        lambda: report(service, job_id, [{"step": 3, "loss": 0.5}]),
    )
    assert seen == [(0, []), (2, []), (2, [2]), (3, [2])]


def test_page_offers_what_the_jobs_state_allows_and_is_done_when_the_job_is(service, watch):
    job_id = service.submit()["id"]

    def offered(page, done):
        return {name for name, button in {"cancel": page._cancel, **page._actions}.items() if button.visible}, done

    seen = watch(
        lambda viewer: JobPage(viewer, job_id),
        offered,
        lambda: service.store.write(lambda session: jobs.transition(session, job_id, JobState.CANCELLED)),
    )
    assert seen == [({"cancel", "pause"}, False), (set(), True)]
