"""A node uses the folders of a service that it shares, and has its own instead of those that it does not."""

from pathlib import Path

import pytest

from manta.workers.node import folders
from manta.workers.node.folders import mark, paths_on_node, shares, unshared
from manta.workers.paths import Paths

ID = "manta-0123456789abcdef"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A service's, marked; this node's user has another one."""
    monkeypatch.setenv("HOME", str(tmp_path / "somebody"))
    mark(tmp_path / "home", ID)
    return tmp_path / "home"


def test_home_marked_by_the_service_counts_as_shared_and_is_used(home):
    mark(home, ID)
    assert shares(home, ID) and unshared([str(home)], ID) == ()
    assert paths_on_node(str(home), ID) == Paths.of(home)


def test_folders_are_all_shared_without_a_service_id(tmp_path):
    assert paths_on_node(str(tmp_path / "not there"), "") == Paths.of(tmp_path / "not there")


@pytest.mark.parametrize("what", ["missing", "of another service", "without a mark", "not to be written", "no text"])
def test_unshared_home_is_replaced_by_a_folder_of_the_node(home, tmp_path, monkeypatch, what):
    if what == "missing":
        home = tmp_path / "elsewhere"
    elif what == "of another service":
        mark(home, "manta-of-somebody-else")
    elif what == "without a mark":
        (home / folders.MARK).unlink()
    elif what == "not to be written":
        monkeypatch.setattr(folders.os, "access", lambda folder, mode: (folder, mode) != (home, folders.os.W_OK))
    else:
        (home / folders.MARK).write_bytes(b"\xff\xff")
    assert unshared([str(home), "/nowhere"], ID) == (str(home), "/nowhere")
    own = paths_on_node(str(home), ID)
    assert own.home == Path(tmp_path, "somebody", ".manta", "nodes", ID)
    assert own.runtime_folder != Paths.of(home).runtime_folder


def test_two_services_on_one_node_have_folders_of_their_own(home):
    assert paths_on_node("/nowhere", ID).tag != paths_on_node("/nowhere", f"{ID}0").tag
