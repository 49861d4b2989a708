"""The list of jobs keeps up with them, through the real API."""

from api.ui.list_page import JobList
from service.store import jobs
from tests.api.support.headless import texts


def test_newcomer_is_told_what_to_do(service, watch):
    def words(page, done):
        return page._welcome.visible, page._table.visible, texts(page._welcome)[-1]

    ((welcome, table, last),) = watch(lambda viewer: JobList(viewer, "http://there"), words)
    assert (welcome, table) == (True, False)
    assert last == "export MANTA_URL=http://there\nmanta submit examples/quickstart.yaml"


def test_list_has_each_job_once_the_newest_on_top_and_those_that_are_gone_no_more(service, watch):
    first = service.submit(name="first")["id"]

    def names(page, done):
        return [text for text in texts(page._body) if text in ("first", "second", "renamed")], page._welcome.visible

    def rename():
        assert service.http.patch(f"/v1/jobs/{first}", json={"name": "renamed"}).status_code == 200

    seen = watch(
        lambda viewer: JobList(viewer, service.url),
        names,
        lambda: service.submit(name="second"),
        rename,
        lambda: service.store.write(lambda session: session.delete(jobs.get(session, first))),
    )
    assert [shown for shown, _ in seen] == [["first"], ["second", "first"], ["second", "renamed"], ["second"]]
    assert not any(welcome for _, welcome in seen)
