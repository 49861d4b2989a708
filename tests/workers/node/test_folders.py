"""Folders of a node: shared ones, its own, and the code that is installed there."""

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from manta.workers.node import folders, host
from manta.workers.node import folders as module
from manta.workers.node.folders import RuntimeFolder, SharedFolders, mark, paths_on_node, shares, unshared
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


FOLDERS = ("/here", "/not/here")


@pytest.fixture
def mount(monkeypatch):
    """Answers when it is told to; how often it was asked."""
    answers, asked = threading.Event(), []

    def poll(folders, installation):
        asked.append(installation)
        assert answers.wait(20)
        return folders[1:]

    monkeypatch.setattr(module, "unshared", poll)
    monkeypatch.setattr(module, "POLL_SECONDS", 0.0)
    answers.asked = asked
    yield answers
    answers.set()


async def test_mount_that_does_not_answer_is_waited_for_once_and_what_was_known_holds(mount, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    folders = SharedFolders(FOLDERS, "manta-1")
    assert await folders.unshared() == (), "at first"
    now[0] += 3600.0
    with monkeypatch.context() as patient:
        patient.setattr(module, "POLL_SECONDS", 3600.0)
        for _ in range(3):  # the time to wait is that of the look, not of each caller
            assert await folders.unshared() == ()
    mount.set()
    folders._check.result(20)
    assert mount.asked == ["manta-1"]
    mount.clear()
    assert await folders.unshared() == ("/not/here",), "the answer that came when nobody waited"
    assert await folders.unshared() == ("/not/here",), "as before"


async def test_concurrent_callers_share_one_check_of_the_shared_folders(mount, monkeypatch):
    monkeypatch.setattr(module, "POLL_SECONDS", 20.0)
    folders = SharedFolders(FOLDERS, "manta-1")
    asyncio.get_running_loop().call_later(0.02, mount.set)
    assert await asyncio.gather(*(folders.unshared() for _ in range(3))) == [("/not/here",)] * 3
    assert len(mount.asked) == 1


async def test_shared_folders_are_checked_again_on_each_call(mount, monkeypatch):
    mount.set()
    monkeypatch.setattr(module, "POLL_SECONDS", 20.0)
    folders = SharedFolders(FOLDERS, "manta-1")
    for _ in range(3):
        assert await folders.unshared() == ("/not/here",)
    assert len(mount.asked) == 3


async def test_failed_check_of_shared_folders_does_not_affect_the_next_call(monkeypatch):
    folders = SharedFolders(FOLDERS, "manta-1")
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(module, "unshared", lambda *about: (_ for _ in ()).throw(MemoryError("no more")))
        await folders.unshared()
    monkeypatch.setattr(module, "unshared", lambda *about: ())
    assert await folders.unshared() == ()


OLD = 1_000_000_000


@pytest.fixture
def paths(monkeypatch, tmp_path):
    """Those of a service whose runtime folder has a file of Ray that is years old, as are all folders."""
    with tempfile.TemporaryDirectory(dir="/tmp") as above:
        monkeypatch.setattr("manta.workers.paths.RUNTIME_FOLDERS", (Path(above), "manta-{user}-{tag}"))
        made = Paths.of(tmp_path)
        (made.make_runtime_folder() / "ray" / "session").mkdir(parents=True)
        for path in (ray_file(made), Path(above) / "another's"):
            path.touch()
        for path in (*made.runtime_folder.rglob("*"), *Path(above).iterdir(), Path(above)):
            os.utime(path, (OLD, OLD))
        yield made


def ray_file(paths):
    return paths.ray_folder / "session" / "node_ip_address.json"


def clean(above, configuration):
    configuration.write_text(f"d {above} 0700 - - 0\n")  # an age of nothing: all goes that is not kept
    subprocess.run(["systemd-tmpfiles", "--clean", str(configuration)], check=True)


@pytest.mark.skipif(
    shutil.which("systemd-tmpfiles") is None,
    reason="there is no systemd-tmpfiles (Debian: apt-get install systemd-standalone-tmpfiles)",
)
def test_systemd_tmpfiles_leaves_a_folder_alone_until_its_daemon_is_gone(paths, tmp_path):
    above, folder = paths.runtime_folder.parent, RuntimeFolder(paths)
    folder.keep()
    clean(above, tmp_path / "clean.conf")
    assert not (above / "another's").exists() and ray_file(paths).exists()
    shutil.rmtree(paths.runtime_folder)
    for _ in range(2):
        folder.keep()
    ray_file(paths).parent.mkdir(parents=True)
    ray_file(paths).touch()
    clean(above, tmp_path / "clean.conf")
    assert ray_file(paths).exists(), "the new folder is kept too"
    folder.release()
    clean(above, tmp_path / "clean.conf")
    assert not ray_file(paths).exists()


def test_runtime_folder_keeps_every_file_fresh_for_tmpfiles(paths, monkeypatch):
    path = paths.runtime_folder / "a.sock"
    with socket.socket(socket.AF_UNIX) as left, contextlib.closing(left):
        left.bind(str(path))
    link = paths.runtime_folder / "latest"
    link.symlink_to("ray")
    for each in (path, link):
        os.utime(each, (OLD, OLD), follow_symlinks=False)
    folder = RuntimeFolder(paths)
    folder.keep()
    assert path.stat().st_mtime == OLD, "not each second"
    monkeypatch.setattr(folders, "TOUCH_SECONDS", 0.0)
    folder.keep()
    folder.release()
    all_there = [paths.runtime_folder, *paths.runtime_folder.rglob("*")]
    assert len(all_there) == 6 and min(min(each.lstat()[7:9]) for each in all_there) > OLD


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    (tmp_path / "one.py").write_text("x = 1\n")
    (tmp_path / "inner" / "two.py").write_text("y = 2\n")
    monkeypatch.setattr(host, "PACKAGE", tmp_path)
    return tmp_path


def code_mark():
    return host.own_code.__wrapped__()


def test_code_mark_changes_exactly_with_the_source_files(package):
    before = code_mark()
    assert len(before) == 16
    (package / "inner" / "notes.txt").write_text("no code")
    assert code_mark() == before
    (package / "inner" / "two.py").write_text("y = 3\n")
    assert code_mark() != before
    (package / "inner" / "two.py").write_text("y = 2\n")
    assert code_mark() == before
    (package / "inner" / "two.py").rename(package / "inner" / "three.py")
    assert code_mark() != before


def test_code_mark_of_the_installed_package_is_hexadecimal():
    assert int(host.own_code(), 16) >= 0
