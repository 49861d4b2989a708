"""Backups: what arrives is what was written, or does not count; who may not write does not."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from stepped_snapshots import parts_of

from manta.workers.errors import SharedMemoryError
from manta.workers.rank.agent import Agent
from manta.workers.rank.trainer_slot import StaleGeneration
from manta.workers.snapshot import backup_transport as wire
from manta.workers.snapshot.backup import MAX_UNAUTHENTICATED, BackupError, BackupSender, BackupServer, fetch
from manta.workers.snapshot.files import NotificationPipe, backup_path, notification_path, notify, snapshot_path
from manta.workers.snapshot.snapshot_file import SnapshotFile, committed_steps
from manta.workers.snapshot.snapshots import Snapshots

IDENTITY, LAYOUT, TOKEN = b"0123456789abcdef", "0a0a0a0a", "a token"
SIZE = 200_000
SECONDS = 30.0


def until(condition: Callable[[], object]) -> None:
    """Wait for what a thread does."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Rank:
    """A trainer's side: a state and its snapshots."""

    def __init__(self, folder: Path, rank: int = 0, size: int = SIZE):
        self.state = [torch.zeros(size), torch.zeros(3)]
        self.snapshots = Snapshots(folder, rank, parts_of(self.state), IDENTITY, LAYOUT, {"rank": rank})

    def commit(self, step: int) -> None:
        """A step: the state tells its number."""
        for tensor in self.state:
            tensor.fill_(step)
        self.snapshots.save(step, f"note of {step}".encode())

    def holds(self, step: int) -> bool:
        """Whether its file gives exactly that step."""
        note = self.snapshots.load(step)
        return note == f"note of {step}".encode() and all(bool((tensor == step).all()) for tensor in self.state)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[BackupServer]:
    """The other node's, of generation 3."""
    server = BackupServer(tmp_path / "there", "127.0.0.1", TOKEN, 3)
    yield server
    server.close()


@pytest.fixture
def send(tmp_path: Path, server: BackupServer) -> Iterator[Callable[..., BackupSender]]:
    """Starts senders of rank 0 to the server."""
    with contextlib.ExitStack() as stack:

        def start(token: str = TOKEN, generation: int = 3, every: int = 1) -> BackupSender:
            sender = BackupSender(tmp_path / "here", 0, LAYOUT, server.address, token, generation, every)
            stack.callback(sender.stop)
            return sender

        yield start


@pytest.fixture
def backed_up(tmp_path: Path, send: Callable[..., BackupSender]) -> Callable[..., tuple[Rank, BackupSender]]:
    """Rank 0 and its sender, once these steps are backed up one by one."""

    def begin(*steps: int) -> tuple[Rank, BackupSender]:
        rank, sender = Rank(tmp_path / "here"), send()
        for step in steps:
            rank.commit(step)
            until(lambda step=step: sender.state.step == step)
        return rank, sender

    return begin


def there(tmp_path: Path) -> list[int]:
    """Steps of the backup."""
    return committed_steps(backup_path(tmp_path / "there", 0, LAYOUT))


def test_committed_snapshots_are_backed_up_and_fetched_back_bit_for_bit(tmp_path, server, backed_up):
    _, sender = backed_up(1, 2, 3)
    assert there(tmp_path) == [2, 3]
    assert (sender.state.sent, sender.state.dropped, sender.state.problem) == (3, 0, None)
    assert sender.state.bytes == 3 * 4 * (SIZE + 3)
    assert fetch(tmp_path / "new", 0, LAYOUT, server.address, TOKEN, 3) == [2, 3]
    assert [path.name for path in (tmp_path / "new").iterdir()] == [f"rank-00000.{LAYOUT}.snapshot"]
    fresh = Rank(tmp_path / "new")
    assert fresh.holds(3)
    assert fresh.holds(2)


def test_trainer_started_before_its_backup_was_fetched_can_load_it(tmp_path, server, backed_up):
    backed_up(1)
    ready = Rank(tmp_path / "new")
    ready.commit(0)
    assert fetch(tmp_path / "new", 0, LAYOUT, server.address, TOKEN, 3) == [1]
    assert ready.holds(1)
    ready.commit(2)
    assert committed_steps(snapshot_path(tmp_path / "new", 0, LAYOUT)) == [1, 2]


def test_backup_sender_started_before_its_trainer_waits_for_the_snapshot_file(tmp_path, send):
    sender = send()
    until(lambda: sender.state.problem is not None)
    assert "there is no snapshot file" in sender.state.problem
    rank = Rank(tmp_path / "here")
    rank.commit(4)
    until(lambda: there(tmp_path) == [4])
    until(lambda: sender.state.problem is None)


def test_backup_sender_follows_a_trainer_to_its_new_snapshot_file(tmp_path, send):
    first = Rank(tmp_path / "here")
    send()
    first.commit(4)
    until(lambda: there(tmp_path) == [4])
    snapshot_path(tmp_path / "here", 0, LAYOUT).unlink()
    Rank(tmp_path / "here").commit(5)
    until(lambda: there(tmp_path) == [4, 5])


@pytest.mark.parametrize("lost", ["here", "there"])
def test_backups_continue_after_the_folder_is_removed_at_either_end(tmp_path, backed_up, lost):
    """With the pipe that tells of new steps, or with the backup."""
    rank, sender = backed_up(1)
    shutil.rmtree(tmp_path / lost)
    for step in (2, 3):
        rank.commit(step)
        until(lambda step=step: sender.state.step == step)
    until(lambda: 3 in there(tmp_path))
    rank.snapshots.close()


def test_slow_backup_sender_skips_steps_and_sends_the_newest(tmp_path, send, monkeypatch):
    real, reached, go_on = wire.send_slot, threading.Event(), threading.Event()

    def slow(*arguments):
        reached.set()
        assert go_on.wait(SECONDS)
        return real(*arguments)

    monkeypatch.setattr(wire, "send_slot", slow)
    rank, sender = Rank(tmp_path / "here"), send()
    rank.commit(1)
    assert reached.wait(SECONDS)
    for step in range(2, 9):
        rank.commit(step)
    rank.snapshots.wait_for_sums()
    go_on.set()
    until(lambda: sender.state.step == 8)
    assert sender.state.dropped == 1, "step 1 was overwritten before it was sent"
    assert there(tmp_path) == [8]


def test_backup_of_every_second_step_sends_only_those(tmp_path, send, monkeypatch):
    rank, sender, looked = Rank(tmp_path / "here"), send(every=2), []
    wait = sender._notifications.wait
    monkeypatch.setattr(
        sender._notifications, "wait", lambda *given: (looked.append(sender.state.step), wait(*given))[1]
    )
    for step in range(1, 6):
        before = len(looked)
        rank.commit(step)
        rank.snapshots.wait_for_sums()
        if step % 2 == 0:
            until(lambda step=step: looked[-1:] == [step])
        else:
            until(lambda before=before: len(looked) > before)
            assert sender.state.step == (step - 1 or None)
    assert there(tmp_path) == [2, 4]


def test_a_slot_that_is_overwritten_on_its_way_is_dropped_and_the_older_backup_stays(tmp_path, server, send):
    """The sender is the test itself: right sums, another content."""
    rank, sender = Rank(tmp_path / "here"), send()
    rank.commit(6)
    until(lambda: there(tmp_path) == [6])
    sender.stop()
    rank.commit(7)
    rank.snapshots.wait_for_sums()
    file = SnapshotFile.open(snapshot_path(tmp_path / "here", 0, LAYOUT))
    newest = wire.sealed_slots(file)[0]
    rank.snapshots._slots[newest.slot][0][1000] = 99.0
    with socket.create_connection(server.address) as connection:
        wire.prepare(connection)
        wire.introduce(connection, TOKEN, wire.BackupRequest("put", 0, LAYOUT, 3))
        wire.send_form(connection, file.form)
        wire.expect_agreement(connection)
        assert wire.send_slot(connection, file, newest) is False
        assert there(tmp_path) == [6]
        rank.snapshots._slots[newest.slot][0][1000] = 7.0
        assert wire.send_slot(connection, file, newest) is True
        assert there(tmp_path) == [6, 7]


def test_a_sender_that_dies_in_the_middle_of_a_slot_leaves_the_older_backup(tmp_path, server, backed_up):
    _, sender = backed_up(6, 7)
    sender.stop()
    file = SnapshotFile.open(snapshot_path(tmp_path / "here", 0, LAYOUT))
    with socket.create_connection(server.address) as connection:
        wire.prepare(connection)
        wire.introduce(connection, TOKEN, wire.BackupRequest("put", 0, LAYOUT, 3))
        wire.send_form(connection, file.form)
        wire.expect_agreement(connection)
        connection.sendall(wire._SLOT.pack(9, 17) + b"x" * 5000)
        until(lambda: there(tmp_path) == [7])
    assert fetch(tmp_path / "new", 0, LAYOUT, server.address, TOKEN, 3) == [7]


def test_backup_follows_a_roll_back_and_drops_later_steps(tmp_path, backed_up):
    """A roll-back: what came after the step that is done again is no state of the job any more."""
    rank, sender = backed_up(4, 5, 6)
    rank.snapshots.clear()
    rank.commit(3)
    until(lambda: sender.state.step == 3)
    assert there(tmp_path) == [3]


def test_backup_of_a_repeated_step_replaces_the_earlier_one(tmp_path, server, backed_up):
    """A roll-back, after which other samples lead to another state of the same step."""
    rank, sender = backed_up(6)
    rank.snapshots.clear()
    for tensor in rank.state:
        tensor.fill_(99)
    rank.snapshots.save(6, b"another 6")
    until(lambda: sender.state.sent == 2)
    assert fetch(tmp_path / "new", 0, LAYOUT, server.address, TOKEN, 3) == [6]
    fresh = Rank(tmp_path / "new")
    assert fresh.snapshots.load(6) == b"another 6"
    assert all(bool((tensor == 99).all()) for tensor in fresh.state)


def test_backup_of_another_rank_with_the_same_state_can_be_fetched_instead(tmp_path, server, backed_up):
    backed_up(1)
    with pytest.raises(BackupError, match="there is no snapshot of rank 1"):
        fetch(tmp_path / "new", 1, LAYOUT, server.address, TOKEN, 3)
    assert fetch(tmp_path / "new", 1, LAYOUT, server.address, TOKEN, 3, of=0) == [1]
    assert committed_steps(snapshot_path(tmp_path / "new", 1, LAYOUT)) == [1]
    assert not snapshot_path(tmp_path / "new", 0, LAYOUT).exists()


def test_oldest_silent_connection_is_dropped_so_that_callers_get_through(tmp_path, server, monkeypatch):
    monkeypatch.setattr(wire, "SILENCE_SECONDS", 100 * SECONDS)
    with contextlib.ExitStack() as stack:
        dial = lambda: stack.enter_context(socket.create_connection(server.address, timeout=SECONDS))  # noqa: E731
        first, *others = (dial() for _ in range(MAX_UNAUTHENTICATED + 1))
        for each in (first, *others):
            assert each.recv(wire.NONCE_BYTES)
        assert first.recv(1) == b"", "the oldest had to go"
        with pytest.raises(BackupError, match="there is no snapshot of rank 0"):
            fetch(tmp_path / "here", 0, LAYOUT, server.address, TOKEN, 3)


def test_backup_server_refuses_callers_without_the_token(tmp_path, server, send):
    Rank(tmp_path / "here").commit(1)
    sender = send(token="a guess")
    until(lambda: sender.state.problem is not None)
    assert sender.state.problem == "the caller does not know the token of this job's generation"
    with pytest.raises(BackupError, match="does not know the token"):
        fetch(tmp_path / "new", 0, LAYOUT, server.address, "a guess", 3)
    assert not (tmp_path / "there").exists()
    assert not (tmp_path / "new").exists()


def test_overheard_introduction_cannot_be_replayed_by_another_caller(server):
    request = {"do": "get", "rank": 0, "layout": LAYOUT, "generation": 3}

    def answer(introduction: Callable[[bytes], dict]) -> str:
        with socket.create_connection(server.address) as connection:
            wire.prepare(connection)
            nonce = wire._bytes(connection, wire.NONCE_BYTES)
            wire.send_message(connection, introduction(nonce))
            return wire.receive_message(connection)["refused"]

    overheard: list[dict] = []

    def genuine(nonce: bytes) -> dict:
        overheard.append({"wish": request, "mac": wire._mac(TOKEN, nonce, request)})
        return overheard[0]

    assert "there is no snapshot of rank 0" in answer(genuine), "the token was accepted"
    assert "does not know the token" in answer(lambda nonce: overheard[0]), "it is good for one nonce"


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 40, b"\x02\x00\x00\x00{}"])
def test_noise_on_a_connection_does_not_disturb_backups(tmp_path, server, send, noise):
    with socket.create_connection(server.address) as connection:
        connection.sendall(noise)
    rank = Rank(tmp_path / "here")
    send()
    rank.commit(1)
    until(lambda: there(tmp_path) == [1])


def test_backup_server_drops_the_sender_of_an_older_generation_for_a_newer_one(tmp_path, server, backed_up):
    rank, old = backed_up(1)
    new = BackupSender(tmp_path / "here", 0, LAYOUT, server.address, TOKEN, 4)
    until(lambda: new.state.step == 1)
    until(lambda: old.state.problem == "generation 3 was replaced by 4")
    rank.commit(2)
    until(lambda: new.state.step == 2)
    assert there(tmp_path) == [1, 2]
    new.stop()
    server.expect("another token", 9)
    with pytest.raises(BackupError, match="does not know the token"):
        fetch(tmp_path / "new", 0, LAYOUT, server.address, TOKEN, 4)
    with pytest.raises(BackupError, match="generation 8 was replaced by 9"):
        fetch(tmp_path / "new", 0, LAYOUT, server.address, "another token", 8)
    with pytest.raises(BackupError, match="generation 8 was replaced by 9"):
        server.expect("yet another", 8)


def test_backup_for_a_former_partner_is_removed_once_no_rank_may_resume_from_it(tmp_path, server, backed_up):
    """Else shared memory would be full of them after some changes of partners."""
    _, sender = backed_up(2)
    sender.stop()
    mine = Rank(tmp_path / "there", 7)
    for step in (5, 6):
        mine.commit(step)
    server.remove_former(7)
    assert there(tmp_path) == [2], "it was sent in this generation"
    server.expect(TOKEN, 4)
    server.remove_former(8)
    assert there(tmp_path) == [2], "nobody knows where a rank without steps goes on from"
    mine.snapshots.clear()
    for step in (2, 3):
        mine.commit(step)
    server.remove_former(7)
    assert there(tmp_path) == [2], "all ranks may go on from step 2"
    mine.commit(4)
    server.remove_former(7)
    assert not backup_path(tmp_path / "there", 0, LAYOUT).exists()
    assert committed_steps(snapshot_path(tmp_path / "there", 7, LAYOUT)) == [3, 4]
    mine.snapshots.close()


def test_backup_sender_reports_that_its_partner_has_no_room(tmp_path, server, send, monkeypatch):
    Rank(tmp_path / "here").commit(1)

    def full(path, form, memory):
        raise SharedMemoryError("no room in shared memory for the snapshots: ...")

    monkeypatch.setattr(wire, "file_of", full)
    sender = send()
    until(lambda: sender.state.problem is not None)
    assert sender.state.problem.startswith("no room in shared memory")
    assert sender.state.sent == 0


def test_fetching_a_backup_that_does_not_exist_is_refused(tmp_path, server):
    with pytest.raises(BackupError, match=f"there is no snapshot of rank 5 in layout {LAYOUT} here"):
        fetch(tmp_path / "new", 5, LAYOUT, server.address, TOKEN, 3)


def test_damaged_backup_is_not_given_out_but_that_of_the_other_step_is(tmp_path, server, backed_up):
    backed_up(1, 2)
    path = backup_path(tmp_path / "there", 0, LAYOUT)
    file = SnapshotFile.open(path)
    with path.open("r+b") as content:
        content.seek(file.form.payload_at(file.slot_of(2)) + 50)
        content.write(b"!")
    assert fetch(tmp_path / "new", 0, LAYOUT, server.address, TOKEN, 3) == [1]


def test_closed_backup_server_leaves_no_files(tmp_path, server, backed_up):
    _, sender = backed_up(1)
    server.close()
    assert list((tmp_path / "there").iterdir()) == []
    until(lambda: sender.state.problem is not None)


def test_agents_keep_each_others_snapshots(tmp_path, go):
    def agent(rank: int, node: str) -> Agent:
        return Agent("job-1", rank, str(tmp_path / "home"), str(tmp_path), str(tmp_path / node))

    async def body():
        mine, partner, replacement = agent(0, "here"), agent(1, "there"), agent(0, "new")
        address = await partner.receive_backups(TOKEN, 1)
        await mine.send_backups(address, TOKEN, 1, LAYOUT)
        rank = Rank(tmp_path / "here")
        for step in (1, 2):
            rank.commit(step)
            while (await mine.backup_progress()).step != step:
                assert (await mine.backup_progress()).problem is None or step == 1
        assert committed_steps(backup_path(tmp_path / "there", 0, LAYOUT)) == [1, 2]
        assert await partner.snapshot_steps() == [], "a backup is no snapshot of its own"
        assert await replacement.snapshot_steps() == []
        assert await replacement.fetch_snapshot(0, address, TOKEN, 1, LAYOUT) == [1, 2]
        assert await replacement.snapshot_steps(LAYOUT) == [1, 2]
        with pytest.raises(BackupError):
            await replacement.fetch_snapshot(0, address, "a guess", 1, LAYOUT)
        mine._slot.generation = 5
        with pytest.raises(StaleGeneration, match="Generation 4 of rank 0 was replaced by 5"):
            await mine.send_backups(address, TOKEN, 4, LAYOUT)
        for each in (mine, partner, replacement):
            await each.close()
        assert not [path for path in tmp_path.rglob("*") if "rank-" in path.name and path.suffix != ".jsonl"]

    go(body)


def test_notifications_before_a_wait_wake_it_once(tmp_path):
    path = notification_path(tmp_path, 0)
    notify(path)
    pipe = NotificationPipe(path)
    assert pipe.wait(0.0) is False
    for _ in range(100_000):
        notify(path) if _ < 3 else pipe.notify()
    assert pipe.wait(0.0) is True
    assert pipe.wait(0.0) is False
    pipe.close()
    assert not path.exists()


def test_backups_need_no_torch():
    program = "import sys, manta.workers.rank.agent, manta.workers.snapshot.backup; "
    program += "print('torch' in sys.modules, 'ray' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert process.stdout == "False False\n", process.stderr
