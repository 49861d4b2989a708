"""A node's runtime folder is left alone by those who clean /tmp."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

from manta.workers.node import folders
from manta.workers.node.folders import RuntimeFolder
from manta.workers.paths import Paths

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
