"""What a snapshot says beside the state."""

import json

from manta.workers.snapshot.note import JOURNAL_ROWS, RowJournal, read_note
from manta.workers.snapshot.snapshot_file import NOTE_BYTES
from manta.workers.training.bad_numbers import NumericsHistory, RollBack

HISTORY = NumericsHistory(((0.1, 1e300), (2.5, 3.0)), (RollBack(8, 3, (range(56, 64),)),))


def _rows(count):
    return [{"step": step, "loss": 1 / step, "validation_loss": float("inf")} for step in range(1, count + 1)]


def _journal(rows):
    journal = RowJournal()
    for row in rows:
        journal.add(row)
    return journal


def test_note_reads_back_as_its_rows_and_history():
    rows = _rows(3)
    assert read_note(_journal(rows).note(HISTORY)) == (rows, HISTORY)
    assert read_note(_journal(rows).note(None)) == (rows, None)
    assert read_note(b"") == ([], None)


def test_rows_that_do_not_fit_into_a_note_are_left_out_the_oldest_first():
    rows = _rows(3)
    whole = _journal(rows).note(HISTORY)
    for most in range(len(whole) + 2):
        note = _journal(rows).note(HISTORY, most)
        assert len(note) <= max(0, most)
        kept, history = read_note(note)
        assert kept == rows[3 - len(kept) :]
        assert history == HISTORY or not note
    assert note == whole
    left = len(json.dumps(rows[0])) + 1
    assert read_note(_journal(rows).note(HISTORY, len(whole) + 1 - left))[0] == rows[1:]


def test_note_keeps_only_the_rows_of_the_last_steps():
    rows = _rows(JOURNAL_ROWS + 5)
    journal = _journal(rows)
    assert read_note(journal.note(None))[0] == rows[5:]
    assert len(journal.note(None)) <= NOTE_BYTES


def test_rows_of_steps_that_were_undone_are_forgotten():
    journal = _journal(_rows(6))
    journal.forget_after(4)
    assert [row["step"] for row in read_note(journal.note(None))[0]] == [1, 2, 3, 4]
    for row in _rows(JOURNAL_ROWS):
        journal.add(row)
    assert len(read_note(journal.note(None))[0]) == JOURNAL_ROWS
    journal.clear()
    assert journal.note(None) == b""
