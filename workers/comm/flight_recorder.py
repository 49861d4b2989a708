"""Reads torch's flight recorder of this process, without waiting for the device.

Private names of torch (2.11 to 2.14): `_dump_nccl_trace_json` for its usual NCCL backend, in builds that have it;
`_dump_fr_trace_json` for the second one (2.14) and for gloo. Both query events and make no call that waits for a
device. Tested with torch 2.13.0 and 2.14.1: recordings of gloo, and NCCL's recorder while it is empty. For 2.11 only
the name is known, and no dump of NCCL was available.
"""

from __future__ import annotations

from torch._C import _distributed_c10d

from workers.liveness.flight_record import FlightRecord, read_flight_record

_NAMES = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


def take_flight_record() -> FlightRecord | None:
    """The flight record of this process; None if there is none, or its format is unknown."""
    for name in _NAMES:
        dump = getattr(_distributed_c10d, name, None)
        if dump is not None:
            try:
                record = read_flight_record(dump())
            except ValueError:
                continue
            if record.sequences:
                return record
    return None
