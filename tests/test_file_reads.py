"""Every place that reads files is known, and safe: who names a file could name a device, a pipe or 40 GB of nothing.

Files that users name are read by `workers/system/regular_files.py`, which needs no entry here. A call is found by its
name: one that is in none of READERS, such as that of a new library, has to be added there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[1] / "src" / "manta"
READERS = {
    "FileIO", "ParquetFile", "ZipFile", "copyfile", "copytree", "fromfile", "load_cert_chain",
    "memmap", "np.load", "open", "open_memory_map", "read_bytes", "read_table", "read_text", "safe_open", "shutil.copy",
    "shutil.copy2", "sqlite3.connect", "torch.load",
}  # fmt: skip
"""Calls that open a file by its name or read one, by the last part of their names or the last two."""
SAFE = {
    "a file that Manta itself writes, in its home, its cache, its temporary folder or shared memory": """
        api/cli/service.py:_private
        api/cli/service.py:_last_error_of
        api/demo/__main__.py:_train
        service/store/backup_file.py:_into_file
        service/store/backup_file.py:_leave_log
        service/store/sqlite.py:preserve_log
        workers/data/prepare.py:_bounds
        workers/data/token_cache.py:_done
        workers/data/token_cache.py:_join
        workers/data/token_cache.py:_join_files
        workers/data/token_cache.py:locked
        workers/data/token_cache.py:read_info
        workers/data/tokenize.py:write_dataset
        workers/data/trained_tokenizer.py:trained_tokenizer
        workers/liveness/progress.py:shared
        workers/snapshot/backup.py:_send_snapshot
        workers/snapshot/backup.py:_run
        workers/snapshot/backup_transport.py:file_of
        workers/snapshot/backup_transport.py:send_slot
        workers/snapshot/files.py:__init__
        workers/snapshot/reshard.py:__init__
        workers/snapshot/snapshot_file.py:create
        workers/snapshot/snapshots.py:_opened
        workers/training/tracing.py:content
    """,
    "a folder, which is opened to be locked or synced": """
        workers/node/folders.py:keep
        workers/standalone.py:alone_in
        workers/storage/files.py:write_atomically
        workers/weights/export.py:_locked
        workers/weights/export.py:_sync
    """,
    "Ray's own file, in the temporary folder of the service": """
        service/cluster/ray_head.py:_running_head
        service/cluster/ray_head.py:_wait_for_address
    """,
    "a file of the kernel, of the container or of the installation": """
        api/ui/__init__.py:_read
        service/cluster/processes.py:start_of
        service/doctor.py:_file_system_of
        service/doctor.py:driver_version
        workers/checkpoint/upload_process.py:_leave
        workers/node/notice_sources.py:_node
        workers/system/resources.py:control_groups
        workers/system/resources.py:_core_limit
        workers/system/host_memory.py:_left_in
        workers/node/host.py:own_code
        workers/zygote/server.py:_redirect
    """,
    "no file by its name: what is given has been opened already, or is something else called open": """
        service/control/owners.py:_own
        workers/checkpoint/archives.py:_by_directory
        workers/checkpoint/durable.py:read
    """,
    "it is what the others are read by": """
        workers/system/regular_files.py:open_regular
    """,
    "read_regular has read it just before": """
        api/server.py:_try_certificate
    """,
    "open_regular has read its header just before, in the same process: a rank's, which is watched for hangs": """
        workers/weights/reading.py:_read
    """,
    "is_file or is_dir was asked just before, and only the command of whoever names it could wait": """
        api/demo/__main__.py:replay
        service/store/sqlite.py:copy_to
    """,
}
"""Why each place is safe. Users' files are in none of the first five groups."""


def reads() -> Iterator[str]:
    for package in ("api", "service", "workers"):
        for path in sorted((HOUSE / package).rglob("*.py")):
            yield from _reads_in(ast.parse(path.read_text()), f"{path.relative_to(HOUSE)}", "")


def _reads_in(node: ast.AST, file: str, within: str) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        within = node.name
    if isinstance(node, ast.Call) and _reads(node):
        yield f"{file}:{within}"
    for child in ast.iter_child_nodes(node):
        yield from _reads_in(child, file, within)


def _reads(call: ast.Call) -> bool:
    *_, before, name = ["", *ast.unparse(call.func).split(".")]
    if not {name, f"{before}.{name}"} & READERS:
        return False
    said = [ast.unparse(each) for each in (*call.args, *(keyword.value for keyword in call.keywords))]
    writes = any(each.startswith(("'w", "'a", "'x")) or "O_WRONLY" in each for each in said)
    return not writes and not any(safe in ast.unparse(call) for safe in ("open_regular(", "'/proc/"))


def test_every_place_that_reads_a_file_is_known_to_be_safe():
    found, listed = set(reads()), [place for places in SAFE.values() for place in places.split()]
    unknown, gone = sorted(found.difference(listed)), sorted(set(listed) - found)
    assert not unknown, (
        f"these open a file: {', '.join(unknown)}; if a user names it, or could have replaced it, read it by "
        "workers/system/regular_files.py, otherwise list the place in SAFE with the reason"
    )
    assert not gone, f"these open no file any more: {', '.join(gone)}; remove them from SAFE"
    assert len(set(listed)) == len(listed)


@pytest.mark.parametrize(
    ("line", "is_read"),
    [
        ("Path(name).read_text()", True), ("open(name)", True), ("os.open(name, os.O_RDWR | os.O_CREAT)", True),
        ("numpy.fromfile(name)", True), ("np.load(name)", True), ("safe_open(name, framework='pt')", True),
        ("path.open('w')", False), ("os.open(name, os.O_WRONLY)", False), ("open_regular(name)", False),
        ("ParquetFile(open_regular(name))", False), ("Path('/proc/stat').read_text()", False), ("json.load(x)", False),
    ],
)  # fmt: skip
def test_reads_are_told_from_writes_and_from_what_is_safe_anyway(line, is_read):
    assert list(_reads_in(ast.parse(f"def f():\n    {line}"), "a.py", "")) == ["a.py:f"] * is_read
