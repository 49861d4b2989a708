"""What ranks say of a recovery, whose reports come in any order."""

from types import SimpleNamespace

from manta.service.store import recoveries


def test_recovery_times_are_those_of_the_last_rank_and_fixed_by_the_first_step():
    row = SimpleNamespace(first_step_at=None, connected_at=None, restored_at=None)
    session = SimpleNamespace(get=lambda table, key: row)
    for connected_at, restored_at in ((5.0, None), (3.0, 9.0), (4.0, 8.0)):
        recoveries.record_latest(session, "job", 2, connected_at=connected_at, restored_at=restored_at)
    assert (row.connected_at, row.restored_at) == (5.0, 9.0)
    row.first_step_at = 10.0
    recoveries.record_latest(session, "job", 2, restored_at=11.0)
    assert row.restored_at == 9.0
