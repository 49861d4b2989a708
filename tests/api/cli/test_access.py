"""`manta keys`, `projects`, `audit`, `link`."""

import json
import time
from functools import partial
from unittest.mock import Mock

import httpx
import pytest

from manta.api.cli import access
from manta.api.client import Client
from manta.service.store import Store, keys
from manta.service.store.location import sqlite_url
from tests.api.support.keys import add_key, bearer


@pytest.fixture
def manta(manta, tmp_path):
    """Runs a command whose home does not exist yet."""
    return partial(manta, MANTA_HOME=str(tmp_path / "other"))


def test_project_is_created_and_its_key_works_until_it_is_revoked(manta, service):
    assert manta("projects", "create", "vision").stdout == "project vision is created\n"
    assert "vision" in manta("projects", "create", "vision", code=2).stderr
    assert [each["name"] for each in json.loads(manta("projects", "list", "--json").stdout)["items"]] == [
        "default",
        "vision",
    ]
    assert "vision" in manta("projects", "list").stdout
    key = manta("keys", "create", "of ada", "--project", "vision", "--user", "ada", "--days", 30).stdout.strip()
    job = json.loads(manta("ps", "--json", MANTA_API_KEY=key).stdout)
    assert job["items"] == []
    refused = manta("keys", "list", code=2, MANTA_API_KEY=key).stderr
    assert "this needs a key with scope admin; 'of ada'" in refused and "has submit" in refused
    shown = manta("keys", "list").stdout
    assert "of ada" in shown and "vision" in shown and key not in shown
    (known,) = [each for each in json.loads(manta("keys", "list", "--json").stdout)["items"] if each["user"] == "ada"]
    assert manta("keys", "revoke", known["id"]).stdout == f"{known['id']} (of ada) is revoked\n"
    ended = manta("ps", code=2, MANTA_API_KEY=key).stderr
    assert ended.startswith(f"the key 'of ada' ({known['id']}) was revoked: send a valid key")
    assert manta("ps", code=2, MANTA_API_KEY=f"{key}x").stderr.startswith("send a valid key")
    assert "revoked" in manta("keys", "list").stdout
    assert "manta keys list" in manta("keys", "revoke", "key_000000000000", code=2).stderr


def test_keys_create_prints_the_limits_of_the_key_as_json_and_requires_a_name(manta):
    limited = ("--installation", "--highest-priority", -1)
    made = json.loads(manta("keys", "create", "prometheus", "--scope", "read", *limited, "--json").stdout)
    assert (made["scope"], made["installation"], made["highest_priority"]) == ("read", True, -1)
    assert made["key"].startswith("manta_")
    assert "give a name for the key" in manta("keys", "create", code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([""], "NAME: must have at least 1 character"),
        (["x", "--user", ""], "--user: must have at least 1 character"),
        (["x", "--days", 10**9], "--days: must be at most 36500"),
        (["x", "--highest-priority", 10**9], "--highest-priority: must be at most 1000"),
    ],
)
def test_invalid_key_is_refused_with_the_names_of_its_options(manta, arguments, sentence):
    assert manta("keys", "create", *arguments, code=2).stderr.startswith(sentence)


def test_empty_key_id_is_refused_with_the_command_that_lists_keys(manta):
    assert manta("keys", "revoke", "", code=2).stderr == "give the id of a key; `manta keys list` lists the keys\n"


def test_audit_lists_requests_newest_first_and_refuses_invalid_filters(manta, service):
    job = service.submit()["id"]
    manta("cancel", job)
    lines = manta("audit", "--target", job).stdout.splitlines()
    assert "cancel_job" in lines[1] and "submit_job" in lines[2] and "127.0.0.1" in lines[1]
    assert json.loads(manta("audit", "--limit", 1, "--json").stdout)["items"][0]["status"] == 202
    assert "The audit log is empty." in manta("audit", "--key", "key_000000000000").stdout
    refused = "target: must be the id of a job, key or node, or the name of a project\n"
    assert manta("audit", "--target", "", code=2).stderr == refused
    assert "key: must be the id of a key; `manta keys list` lists" in manta("audit", "--key", "mine", code=2).stderr


def test_link_command_prints_a_dashboard_link_that_works_once(manta):
    link = manta("link").stdout.strip()
    assert httpx.get(link).status_code == 200
    assert httpx.get(link).status_code == 404
    known = json.loads(manta("link", "--json").stdout)
    assert known["path"].startswith("/link/manta_browser_") and known["url"].endswith(known["path"])


def test_links_to_the_page_of_a_job(manta, service, monkeypatch):
    job, browser = service.submit()["id"], Mock()
    assert f'href="/ui/jobs/{job}"' in httpx.get(manta("link", "small").stdout.strip()).text
    assert httpx.get(manta("link").stdout.strip(), params={"job": "//elsewhere"}).status_code == 422
    monkeypatch.setattr(access.webbrowser, "get", lambda: browser)
    assert manta("open", job).stdout == f"{service.url}/ui/jobs/{job}\n"
    assert manta("open").stdout == f"{service.url}/ui/\n"
    assert [call.args for call in browser.open_new_tab.call_args_list] == [
        (f"{service.url}/ui/jobs/{job}",),
        (f"{service.url}/ui/",),
    ]


def test_key_is_created_in_the_database_before_a_service_runs(manta, tmp_path):
    key = manta("keys", "create", "--admin").stdout.strip()
    again = json.loads(manta("keys", "create", "second", "--admin", "--days", 1, "--json").stdout)
    store = Store(sqlite_url(tmp_path / "other" / "manta.db"))
    with store.read() as session:
        named = {each.name: each for each in keys.page(session, None).items}
        assert keys.may_administrate(session, 0.0)
    store.close()
    assert named["admin"].installation and named["admin"].expires_at is None
    assert named["second"].id == again["id"]
    assert named["second"].expires_at == pytest.approx(time.time() + 86_400, abs=60)
    assert key.startswith("manta_") and key != again["key"]
    assert "--admin creates a key in the database" in manta("keys", "create", "--admin", "--user", "ada", code=2).stderr


def test_given_key_is_added_once_without_a_service(manta, tmp_path):
    drawn = {"MANTA_API_KEY": f"manta_{'0123456789abcdef' * 4}"}
    added = json.loads(manta("keys", "add", "prometheus", "--scope", "read", "--json", **drawn).stdout)
    assert (added["scope"], added["installation"]) == ("read", True) and "key" not in added
    assert manta("keys", "add", "prometheus", "--scope", "read", **drawn).stdout.startswith(
        f"{added['id']} (prometheus)"
    )
    store = Store(sqlite_url(tmp_path / "other" / "manta.db"))
    with store.read() as session:
        assert [each.id for each in keys.page(session, None).items] == [added["id"]]
    store.close()
    assert "is known already" in manta("keys", "add", "admin", code=2, **drawn).stderr
    assert "must be manta_ and 43 to 128" in manta("keys", "add", "admin", code=2, MANTA_API_KEY="manta_secret").stderr
    assert "set MANTA_API_KEY" in manta("keys", "add", "admin", code=2, MANTA_API_KEY="").stderr


def test_client_prefers_its_key_argument_to_the_environment(service):
    key = add_key(service.store, "submit", "theirs")
    with Client(service.url, key=key) as client:
        assert client.projects().items[0].name == "theirs"
    with Client(service.url) as client:
        made = client.create_key("a", "read", project="theirs")
        assert client.keys().items[0].id == made.id
        assert client.revoke_key(made.id).revoked_at is not None
        assert client.audit().items[0].operation == "revoke_key"
        assert client.create_project("more").name == "more"
        assert client.link().path
    assert service.http.get("/v1/jobs", headers=bearer(made.key)).status_code == 401


def test_square_brackets_in_names_are_printed_literally(manta):
    name = "[/x] of [red]ada"
    made = json.loads(manta("keys", "create", name, "--json").stdout)
    assert name in manta("keys", "list").stdout
    assert manta("keys", "revoke", made["id"]).stdout == f"{made['id']} ({name}) is revoked\n"
