"""Folders outside of the home, whose names anybody can guess: ours alone, or an error."""

import os
import stat

import pytest

from workers import paths
from workers.paths import Paths, UnsafePath, safe_name


@pytest.fixture
def ours(tmp_path, monkeypatch):
    """Paths whose shared memory is a folder of the test."""
    monkeypatch.setattr(paths, "SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    return Paths.of(tmp_path / "home")


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


def test_folder_that_others_may_write_to_is_refused(ours):
    ours.snapshot_root.mkdir()
    ours.snapshot_root.chmod(0o777)
    with pytest.raises(UnsafePath, match="only you can write to"):
        ours.make_snapshot_root()


def test_link_in_its_place_is_refused(ours, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    ours.snapshot_root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafePath):
        ours.make_snapshot_root()


def test_folder_of_somebody_else_is_refused(ours, monkeypatch):
    ours.snapshot_root.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(UnsafePath, match="that is yours"):
        ours.make_snapshot_root()


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a\0", "-x", "x" * 129])
def test_name_that_leads_elsewhere_is_refused(name):
    with pytest.raises(UnsafePath, match="cannot name a folder"):
        safe_name(name)
