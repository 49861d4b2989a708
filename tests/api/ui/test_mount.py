"""The dashboard beside the API in one app."""

from fastapi.testclient import TestClient

from api.app import create_app
from api.ui import mount
from service.store import Store


class Control:
    """As much of a control plane as these requests need."""

    def __init__(self, folder):
        self.store = Store(f"sqlite:///{folder}/manta.db")
        self.store.migrate()
        self.home = folder

    def ready(self):
        return []


def served(folder):
    folder.mkdir()
    app = create_app(Control(folder))
    mount(app, "http://127.0.0.1:9")  # nobody answers there
    return app


def test_the_api_keeps_every_path_that_is_not_the_dashboards(tmp_path):
    with TestClient(served(tmp_path / "a"), base_url="http://127.0.0.1") as http:
        for path in ("/v1/nope", "/nope", "/uix"):
            response = http.get(path)
            assert (response.status_code, response.headers["content-type"]) == (404, "application/problem+json"), path
        assert http.get("/v1/jobs").json() == {"items": [], "next_cursor": None}
        assert not [path for path in http.get("/openapi.json").json()["paths"] if path.startswith("/ui") or path == "/"]


def test_addresses_lead_to_the_dashboard(tmp_path):
    with TestClient(served(tmp_path / "a"), base_url="http://127.0.0.1") as http:
        for path in ("/", "/ui"):
            response = http.get(path, follow_redirects=False)
            assert (response.status_code, response.headers["location"]) == (307, "/ui/")
        assert http.get("/ui/").status_code == 200
        assert http.get("/ui/nope").status_code == 404


def test_pages_are_served_while_the_service_does_not_answer(tmp_path):
    with TestClient(served(tmp_path / "a"), base_url="http://127.0.0.1") as http:
        for path in ("/ui/", "/ui/jobs/job_000000000000"):
            response = http.get(path)
            assert response.status_code == 200
            assert "Cannot reach the service" in response.text


def test_a_process_may_have_one_app_after_another(tmp_path):
    for name in ("a", "b"):
        with TestClient(served(tmp_path / name), base_url="http://127.0.0.1") as http:
            assert http.get("/ui/").status_code == 200


def test_apps_may_be_made_before_one_is_started(tmp_path):
    served(tmp_path / "a")
    with TestClient(served(tmp_path / "b"), base_url="http://127.0.0.1") as http:
        assert http.get("/ui/").status_code == 200
