"""What travels between the keepers of backups: a length and one JSON object, and nothing else is taken for one."""

import contextlib
import socket

import pytest

from manta.workers.snapshot import backup_transport as wire
from manta.workers.snapshot.backup_transport import MESSAGE_BYTES, BackupError


@pytest.fixture
def connected():
    ours, theirs = socket.socketpair()
    with contextlib.closing(ours), contextlib.closing(theirs):
        yield ours, theirs


def test_received_backup_messages_equal_the_sent_ones_in_order(connected):
    ours, theirs = connected
    messages = [{}, {"step": 3, "name": "é", "nested": {"list": [1, None, "x"]}}]
    for message in messages:
        wire.send_message(ours, message)
    assert [wire.receive_message(theirs) for _ in messages] == messages


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"name": "\xff"}', "no JSON is"),
        (b'{"step": ', "no JSON is"),
        (b"", "no JSON is"),
        (b"[]", "no JSON object"),
        (b"7", "no JSON object"),
    ],
)
def test_message_that_is_not_a_json_object_is_refused(connected, content, said):
    ours, theirs = connected
    ours.sendall(wire._LENGTH.pack(len(content)) + content)
    with pytest.raises(BackupError, match=said):
        wire.receive_message(theirs)


def test_message_that_is_too_long_is_refused_before_it_is_read(connected):
    ours, theirs = connected
    ours.sendall(wire._LENGTH.pack(MESSAGE_BYTES + 1))
    with pytest.raises(BackupError, match=f"a message of {MESSAGE_BYTES + 1} bytes"):
        wire.receive_message(theirs)
