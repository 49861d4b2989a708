"""What torch's flight recorder writes as JSON, made up: format 2.10 of torch 2.13 and 2.14, as its header
`FlightRecorderDetail.hpp` writes it and NCCL fills it. That torch's own analysis takes it is tested."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any


class FlightDump:
    """The recorder of one rank."""

    def __init__(self, forgotten: int = 0):
        """`forgotten`: operations that had been overwritten."""
        self.entries: list[dict[str, Any]] = []
        self.groups: dict[str, dict[str, str]] = {}
        self._next, self._operations = forgotten, 0
        self._numbers: dict[tuple[int, bool], int] = defaultdict(int)

    def collective(
        self,
        group: str,
        ranks: Sequence[int],
        kind: str = "all_reduce",
        sizes: Sequence[int] = (8,),
        state: str = "completed",
        made: int = 0,
        dtype: str = "Float",
    ) -> None:
        """A collective of `group`, the one that was `made` so many groups later."""
        self._numbers[made, False] += 1
        self._add(group, ranks, kind, sizes, state, made, dtype, is_p2p=False)

    def message(
        self, group: str, ranks: Sequence[int], kind: str, source: int, to: int, sizes: Sequence[int], state: str
    ) -> None:
        """A message by itself between two indices of `group`."""
        self._numbers[0, True] += 1
        ends = f"{source}->{to}" if kind == "send" else f"{to}<-{source}"
        self._add(group, ranks, f"{kind} {ends}", sizes, state, 0, "Float", is_p2p=True)

    def batch(self, group: str, ranks: Sequence[int], peers: Sequence[int], state: str) -> None:
        """Messages to and from `peers`, begun as one: only that has events."""
        self._numbers[0, True] += 1
        for peer in peers:
            self._add(group, ranks, f"recv 0<-{peer}", (8,), "scheduled", 0, "Float", is_p2p=True)
            self._add(group, ranks, f"send 0->{peer}", (8,), "scheduled", 0, "Float", is_p2p=True)
        self._add(group, ranks, "coalesced", None, state, 0, "Float", is_p2p=True)

    def _add(
        self,
        group: str,
        ranks: Sequence[int],
        name: str,
        sizes: Sequence[int] | None,
        state: str,
        made: int,
        dtype: str,
        is_p2p: bool,
    ) -> None:
        name_of_group = "0" if group == "default_pg" else f"group of {ranks[0]} and so on: {group}"
        self.groups[name_of_group] = {"name": name_of_group, "desc": group, "ranks": str(list(ranks))}
        self._operations += 1
        tensors = [] if sizes is None else [list(sizes)]
        dtypes = [] if sizes is None else [dtype]
        self.entries.append(
            {
                "record_id": self._next, "pg_id": made, "process_group": [name_of_group, group],
                "thread_name": "pt_autograd_0", "thread_id": "140645126110080",
                "collective_seq_id": self._numbers[made, False], "p2p_seq_id": self._numbers[made, True],
                "op_id": self._operations, "profiling_name": f"nccl:{name}",
                "time_created_ns": 1795650021699368678 + self._next, "input_sizes": tensors, "input_dtypes": dtypes,
                "output_sizes": tensors, "output_dtypes": dtypes, "state": state, "time_discovered_started_ns": 0,
                "time_discovered_completed_ns": 0 if state != "completed" else 1795650021699368679 + self._next,
                "retired": state == "completed", "timeout_ms": 1800000, "is_p2p": is_p2p,
            }
        )  # fmt: skip
        self._next += 1

    @property
    def document(self) -> dict[str, Any]:
        """What torch writes; without operations it leaves the key out."""
        made: dict[str, Any] = {"version": "2.10", "comm_lib_version": "2.30.7", "nccl_comm_state": {}}
        made |= {"pg_config": self.groups, "pg_status": {}}
        return made | ({"entries": self.entries} if self.entries else {})

    @property
    def text(self) -> bytes:
        """As JSON."""
        return json.dumps(self.document).encode()
