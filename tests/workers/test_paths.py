"""Folders outside of the home, whose names anybody can guess: ours alone, or an error."""

import os
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest

from manta.workers import paths
from manta.workers.paths import NoHomeFolder, Paths, UnsafePath, safe_name, zygote_socket


@pytest.fixture
def ours(tmp_path, monkeypatch):
    """Paths whose shared memory is a folder of the test."""
    monkeypatch.setattr(paths, "SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    return Paths.of(tmp_path / "home")


def test_home_of_a_user_without_a_home_folder_is_one_sentence(monkeypatch):
    monkeypatch.setattr(Path, "expanduser", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    with pytest.raises(NoHomeFolder, match=r"~/\.manta: this user has no home folder: set MANTA_HOME"):
        Paths.of("~/.manta")


def mode(folder):
    return stat.S_IMODE(folder.lstat().st_mode)


def test_folder_in_shared_memory_is_for_its_user_alone(ours):
    assert mode(ours.make_snapshot_root()) == 0o700
    assert ours.make_snapshot_root() == ours.snapshot_root, "a second time too"


def test_folder_of_an_older_release_is_closed(ours):
    ours.snapshot_root.mkdir(mode=0o755)
    ours.snapshot_root.chmod(0o755)
    ours.make_snapshot_root()
    assert mode(ours.snapshot_root) == 0o700


def test_snapshot_folder_that_others_may_write_to_is_refused(ours):
    ours.snapshot_root.mkdir()
    ours.snapshot_root.chmod(0o777)
    with pytest.raises(UnsafePath, match="only you can write to"):
        ours.make_snapshot_root()


def test_link_in_its_place_is_refused(ours, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    ours.snapshot_root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafePath):
        ours.make_snapshot_root()


def test_snapshot_folder_of_another_user_is_refused(ours, monkeypatch):
    ours.snapshot_root.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(UnsafePath, match="that is yours"):
        ours.make_snapshot_root()


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a\0", "-x", "x" * 129])
def test_unsafe_folder_name_is_refused(name):
    with pytest.raises(UnsafePath, match="cannot name a folder"):
        safe_name(name)


@pytest.fixture
def runtime(tmp_path):
    """Paths whose runtime folder, which lies in /tmp whatever the home, goes with the test."""
    made = Paths.of(tmp_path / "home")
    yield made
    made.remove_runtime_folder()
    assert not made.runtime_folder.exists()
    made.remove_runtime_folder()  # where there is none, nothing happens


def test_socket_folder_is_private_to_its_user(runtime):
    before = os.umask(0)
    try:
        assert runtime.make_runtime_folder() == runtime.runtime_folder
        assert mode(runtime.runtime_folder) == 0o700
        assert runtime.make_runtime_folder() == runtime.runtime_folder, "a second time too"
    finally:
        os.umask(before)


@pytest.mark.parametrize(("bits", "is_refused"), [(0o755, False), (0o740, False), (0o720, True), (0o702, True)])
def test_socket_folder_is_made_private_unless_others_could_have_written_to_it(runtime, bits, is_refused):
    runtime.runtime_folder.mkdir()
    runtime.runtime_folder.chmod(bits)
    if is_refused:
        with pytest.raises(UnsafePath, match="only you can write to"):
            runtime.make_runtime_folder()
    else:
        assert mode(runtime.make_runtime_folder()) == 0o700


def test_runtime_folder_of_another_user_is_refused(runtime, monkeypatch):
    runtime.make_runtime_folder()
    folder, owner = runtime.runtime_folder, os.getuid()
    monkeypatch.setattr(Paths, "runtime_folder", folder)
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(UnsafePath):
        runtime.make_runtime_folder()


@pytest.mark.parametrize("make", [Paths.make_runtime_folder, Paths.make_snapshot_root])
def test_link_to_a_private_folder_is_refused(ours, tmp_path, monkeypatch, make):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    lstat = Path.lstat

    def as_private(path):
        """On some systems a link has the mode of what it leads to."""
        status = list(lstat(path))
        status[0] = stat.S_IFLNK | 0o700
        return os.stat_result(status)

    monkeypatch.setattr(Path, "lstat", as_private)
    monkeypatch.setattr(Paths, "runtime_folder", link)
    monkeypatch.setattr(Paths, "snapshot_root", link)
    with pytest.raises(UnsafePath):
        make(ours)


def test_removing_snapshots_spares_those_of_another_home(ours, tmp_path):
    other = Paths.of(tmp_path / "other")
    for each in (ours, other):
        each.make_snapshot_root()
        each.snapshot_folder("job").mkdir()
    ours.remove_snapshots()
    assert not ours.snapshot_root.exists() and other.snapshot_folder("job").exists()
    ours.remove_snapshots()  # a second time is no harm


def test_job_paths_lie_below_the_jobs_folder_and_two_homes_share_nothing(tmp_path):
    here, there = Paths.of(tmp_path / "here"), Paths.of(tmp_path / "there")
    assert Paths.of(f"{tmp_path}/there/../here").tag == here.tag != there.tag
    job = tmp_path / "here" / "jobs" / "job-1"
    assert (here.job_folder("job-1"), here.checkpoint_folder("job-1")) == (job, job / "checkpoints")
    assert here.rank_log("job-1", 3) == job / "logs" / "rank-00003.jsonl"
    assert here.snapshot_folder("job-1") == here.snapshot_root / "job-1"
    assert here.runtime_folder != there.runtime_folder and here.snapshot_root != there.snapshot_root
    assert str(os.getuid()) in here.runtime_folder.name, "users of a machine are told apart"
    for leave in (here.job_folder, here.snapshot_folder, here.zygote_log):
        with pytest.raises(UnsafePath):
            leave("../other")


def test_nodes_of_one_machine_have_a_zygote_each(tmp_path):
    one, other = "a" * 32, "b" * 32
    assert zygote_socket(tmp_path).name == "zygote.sock"
    names = {zygote_socket(tmp_path, node).name for node in (one, other)} | {zygote_socket(tmp_path).name}
    assert len(names) == 3
    assert zygote_socket(tmp_path, one).name == f"zygote-{one[:12]}.sock"
    assert Paths.of(tmp_path).zygote_log(one) == tmp_path / "logs" / f"zygote-{one[:12]}.log"


@pytest.mark.parametrize("name", ["a", "job-1", "0.x_Y-", "x" * 128])
def test_safe_folder_name_is_unchanged(name):
    assert safe_name(name) == name
