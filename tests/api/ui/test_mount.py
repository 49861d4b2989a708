"""The dashboard beside the API in one app."""

import json
import re
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from sqlalchemy.exc import OperationalError

from manta.api import ui
from manta.api.app import create_app
from manta.api.app_state import state_of
from manta.api.security import credentials
from manta.api.security.request_guard import BelowPrefix
from manta.api.ui import DIGEST, FILES, document_for, mount
from manta.service.store import Store
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
    add_admin(state_of(app).control.store)
    return TestClient(app, base_url="http://127.0.0.1", headers=bearer(ADMIN))


def test_the_api_keeps_every_path_that_is_not_the_dashboards(tmp_path):
    with opened(served(tmp_path / "a")) as http:
        for path in ("/v1/nope", "/nope", "/uix"):
            response = http.get(path)
            assert (response.status_code, response.headers["content-type"]) == (404, "application/problem+json"), path
        assert http.get("/v1/jobs").json() == {"items": [], "next_cursor": None}
        assert not [path for path in http.get("/openapi.json").json()["paths"] if path.startswith("/ui") or path == "/"]


@pytest.mark.parametrize("seen", ["", "/manta", "/manta/manta"], ids=["removed by the proxy", "kept", "twice"])
def test_service_below_a_path_of_a_proxy_answers_there(tmp_path, seen):
    app = served(tmp_path / "a")
    app.add_middleware(BelowPrefix, prefix="/manta")
    with opened(app) as http:
        assert http.get(f"{seen}/", follow_redirects=False).headers["location"] == "/manta/ui/"
        assert f'src="/manta/ui/static/{DIGEST}/main.js"' in http.get(f"{seen}/ui/").text
        assert http.get(f"{seen}/v1/jobs").status_code == 200
        refused = http.post(f"{seen}/v1/jobs", content="{}", headers={"content-type": "text/plain"})
        assert refused.json()["code"] == "unsupported_media_type"


def test_dashboard_is_reached_from_the_root_and_its_own_addresses(tmp_path):
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

        monkeypatch.setattr(credentials, "CACHE_SECONDS", 1000.0)
        for name in ("read", "read_rows", "read_once"):
            monkeypatch.setattr(Store, name, locked)
        for path in ("/ui/", "/ui/jobs/job_000000000000", f"/ui/static/{DIGEST}/main.js"):
            assert http.get(path).status_code == 200


def test_dashboard_pages_and_files_need_a_signed_in_browser(tmp_path):
    with TestClient(served(tmp_path / "a"), base_url="http://127.0.0.1") as http:
        for path in ("/", "/ui", "/ui/", "/ui/nope", f"/ui/static/{DIGEST}/main.js"):
            response = http.get(path)
            assert (response.status_code, response.headers["content-type"]) == (401, "text/html; charset=utf-8"), path
            assert "manta link" in response.text
        assert http.post("/ui/yaml", json={"text": "a: 1"}).status_code == 401


def test_dashboard_files_are_cached_forever_and_pages_never(tmp_path):
    with opened(served(tmp_path / "a")) as http:
        page, file = http.get("/ui/jobs/job_000000000000"), http.get(f"/ui/static/{DIGEST}/main.js")
        assert page.headers["cache-control"] == "no-store" and "immutable" in file.headers["cache-control"]
        assert file.headers["content-type"].startswith("text/javascript")
        for response in (page, file):
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy
            assert response.headers["x-content-type-options"] == "nosniff"
        for path in (f"/ui/static/{DIGEST}/../__init__.py", f"/ui/static/{DIGEST}/nope.js", "/ui/static/other/main.js"):
            assert http.get(path).status_code == 404, path


def test_dashboard_imports_resolve_to_packaged_files():
    """Modules import one another by relative paths, and the document names where it begins."""
    for name, file in FILES.items():
        for path in re.findall(r"""(?:from|import\()\s*["'](\.[^"']+)["']""", file.content.decode()):
            wanted = (Path("/") / Path(name).parent / path).resolve().relative_to("/").as_posix()
            assert wanted in FILES, f"{name} imports {path}"
    for name in re.findall(rf"/ui/static/{DIGEST}/([^\"]+)", document_for("")):
        assert name in FILES
    packaged = [path for path in Path(ui.__file__).parent.rglob("*") if path.suffix in (".js", ".css", ".svg")]
    assert len(packaged) == len(FILES)


def test_dashboard_files_refer_to_no_external_addresses():
    for name, file in FILES.items():
        addresses = re.findall(r"https?://[^\s\"'`)]+", file.content.decode())
        assert [each for each in addresses if "www.w3.org" not in each] == [], name


def test_dashboard_document_has_the_proxy_path_and_the_job_states():
    document = document_for("/manta")
    assert 'data-base="/manta"' in document and f'src="/manta/ui/static/{DIGEST}/main.js"' in document
    facts = json.loads(re.search(r'id="facts">(.*?)</script>', document).group(1))
    assert "RUNNING" in facts["states"] and facts["actions"]["cancel"]["RUNNING"] == "CANCELLING"
    assert set(facts["final_states"]) < set(facts["states"])


def test_dashboard_yaml_endpoint_returns_the_document_for_rest(tmp_path):
    with opened(served(tmp_path / "a")) as http:
        text = "model: {layers: 2}\ntrain: {learning_rate: 1.0e-3}\n"
        assert http.post("/ui/yaml", json={"text": text}).json() == {
            "document": {"model": {"layers": 2}, "train": {"learning_rate": 1e-3}}
        }
        bad = http.post("/ui/yaml", json={"text": "model: {layers: 2\n"})
        assert (bad.status_code, bad.json()["code"]) == (422, "invalid_spec")
        assert "line" in bad.text
        assert http.post("/ui/yaml", json={"txt": ""}).status_code == 422
        for endless in ("a: &a [*a]", "a: &a [1, 1]\n" + "".join(f"a{n}: &a [*a, *a]\n" for n in range(60))):
            bad = http.post("/ui/yaml", json={"text": endless})
            assert (bad.status_code, bad.json()["code"]) == (422, "invalid_spec")


@pytest.mark.parametrize("path", ["/ui/", "/ui/compare", "/ui/jobs/x/ranks"])
def test_several_apps_in_one_process_serve_the_same_dashboard(tmp_path, path):
    for name in ("a", "b"):
        with opened(served(tmp_path / name)) as http:
            assert http.get(path).status_code == 200
