"""The dashboard beside the API in one app."""

import pytest
from fastapi.testclient import TestClient
from sqlalchemy.exc import OperationalError
from starlette.websockets import WebSocketDisconnect

from api import credentials
from api.app import create_app
from api.ui import mount
from service.store import Store
from tests.api.support.keys import ADMIN, add_admin, bearer


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
    mount(app)
    return app


def opened(app):
    """A browser that sends a key."""
    add_admin(app.state.control.store)
    return TestClient(app, base_url="http://127.0.0.1", headers=bearer(ADMIN))


def test_the_api_keeps_every_path_that_is_not_the_dashboards(tmp_path):
    with opened(served(tmp_path / "a")) as http:
        for path in ("/v1/nope", "/nope", "/uix"):
            response = http.get(path)
            assert (response.status_code, response.headers["content-type"]) == (404, "application/problem+json"), path
        assert http.get("/v1/jobs").json() == {"items": [], "next_cursor": None}
        assert not [path for path in http.get("/openapi.json").json()["paths"] if path.startswith("/ui") or path == "/"]


def test_addresses_lead_to_the_dashboard(tmp_path):
    with opened(served(tmp_path / "a")) as http:
        for path in ("/", "/ui"):
            response = http.get(path, follow_redirects=False)
            assert (response.status_code, response.headers["location"]) == (307, "/ui/")
        assert http.get("/ui/").status_code == 200
        assert http.get("/ui/nope").status_code == 404


def test_pages_are_served_while_the_database_does_not_answer(tmp_path, monkeypatch):
    app = served(tmp_path / "a")
    with opened(app) as http:
        http.get("/ui/")  # the key is known for a second

        def locked(self):
            raise OperationalError("SELECT", {}, Exception("database is locked"))

        monkeypatch.setattr(credentials, "KNOWN_SECONDS", 1000.0)
        for name in ("read", "read_rows", "read_once"):
            monkeypatch.setattr(Store, name, locked)
        for path in ("/ui/", "/ui/jobs/job_000000000000"):
            response = http.get(path)
            assert response.status_code == 200
            assert "the job database does not answer" in response.text


def test_pages_and_their_sockets_are_for_those_who_are_signed_in(tmp_path):
    with TestClient(served(tmp_path / "a"), base_url="http://127.0.0.1") as http:
        for path in ("/", "/ui", "/ui/", "/ui/nope", "/ui/_nicegui/x"):
            response = http.get(path)
            assert (response.status_code, response.headers["content-type"]) == (401, "text/html; charset=utf-8"), path
            assert "manta link" in response.text
        with pytest.raises(WebSocketDisconnect), http.websocket_connect("/ui/_nicegui_ws/socket.io/?EIO=4"):
            pass


def test_a_process_may_have_one_app_after_another(tmp_path):
    for name in ("a", "b"):
        with opened(served(tmp_path / name)) as http:
            assert http.get("/ui/").status_code == 200


def test_apps_may_be_made_before_one_is_started(tmp_path):
    served(tmp_path / "a")
    with opened(served(tmp_path / "b")) as http:
        assert http.get("/ui/").status_code == 200
