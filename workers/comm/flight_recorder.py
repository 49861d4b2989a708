"""torch's recorder of the collectives that a process has issued."""

from __future__ import annotations

from torch._C import _distributed_c10d

from manta.workers.liveness.flight_record import FlightRecord, read_flight_record

# Private names of torch (2.11 to 2.14): the first for its usual NCCL backend, in builds that have it; the other for the
# second one (2.14) and for gloo. Both query events and make no call that waits for a device. Tested with torch 2.13.0
# and 2.14.1: recordings of gloo, and NCCL's recorder while it is empty. For 2.11 only the name is known, and no dump of
# NCCL was available.
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


def capture_flight_record() -> FlightRecord | None:
    """This process's flight record by torch, without waiting for the device; None if there is none that can be read."""
    for name in _DUMPS:
        dump = getattr(_distributed_c10d, name, None)
        if dump is not None:
            try:
                record = read_flight_record(dump())
            except ValueError:
                continue
            if record.sequences:
                return record
    return None
