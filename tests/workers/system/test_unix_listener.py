"""A socket on which a process listens stays where others look for it, whoever removes its file."""

import contextlib
import os
import shutil
import socket

import pytest

from manta.workers.system.sockets import UnixListener


@pytest.fixture
def path(tmp_path):
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder" / "a.sock"


def reaches(listener):
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(listener.path))
        listener.socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            listener.socket.accept()[0].close()
            return True
    return False


def test_unix_socket_is_private_and_replaces_a_stale_one(path):
    with UnixListener(path).socket, contextlib.closing(UnixListener(path)) as second:
        assert path.stat().st_mode & 0o777 == 0o600
        assert list(path.parent.iterdir()) == [path]
        assert reaches(second)


def replace_with_socket(path):
    path.unlink()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))


def replace_with_file(path):
    path.unlink()
    path.touch()


@pytest.mark.parametrize("lose", [os.unlink, replace_with_socket, replace_with_file])
def test_unreachable_socket_gets_a_successor_at_its_path(path, lose):
    first = UnixListener(path)
    assert first.successor() is None and reaches(first)
    lose(path)
    with contextlib.closing(first.successor()) as second:
        first.close()
        assert reaches(second) and second.successor() is None


def test_unix_listener_has_no_successor_until_its_folder_exists_again(path):
    first = UnixListener(path)
    shutil.rmtree(path.parent)
    assert first.successor() is None
    path.parent.mkdir()
    with contextlib.closing(first.successor()) as second:
        assert reaches(second)
    assert not path.exists()
    first.close()


def test_answering_socket_of_another_process_is_left_alone(path):
    first = UnixListener(path)
    with contextlib.closing(UnixListener(path)) as second:
        assert first.successor() is None
        first.close()
        assert reaches(second)
