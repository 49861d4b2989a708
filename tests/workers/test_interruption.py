"""Ctrl-C in commands, while they load and later."""

import ast
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from manta.workers.interruption import cleaning_up_when_terminated, ending_at_once, run_command

ROOT = Path(__file__).parents[2]
PROGRAMS = ("run", "evaluate", "generate", "calibration/__main__", "data/tokenize", "weights/export")
IMPORTS = (ast.Import, ast.ImportFrom)


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_command_that_is_interrupted_ends_in_a_word(monkeypatch, capsys):
    module = ModuleType("interrupted_command")
    module.main = interrupt
    monkeypatch.setitem(sys.modules, "interrupted_command", module)
    with pytest.raises(SystemExit) as ended:
        run_command("interrupted_command")
    assert (ended.value.code, capsys.readouterr().err) == (130, "interrupted\n")


SWALLOWED = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000): pass
except KeyboardInterrupt:
    raise ImportError("cannot load module more than once per process")
"""


@pytest.mark.parametrize(
    ("module", "program"),
    [
        ("loaded", "from manta.workers.interruption import run_command; run_command('loaded')"),
        ("api/cli/overview", "from manta.api.cli import __main__ as manta; manta.main()"),
    ],
)
def test_command_interrupted_while_loading_ends_with_one_word(tmp_path, module, program):
    """Whatever the module that is being loaded makes of a KeyboardInterrupt. Files of `tmp_path` hide ours."""
    file = tmp_path / f"{module}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(SWALLOWED)
    hidden = (
        "import signal, sys, manta.api.cli; "
        f"sys.path.insert(0, {str(tmp_path)!r}); manta.api.cli.__path__.insert(0, {str(file.parent)!r}); "
        # A shell has what it starts in the background ignore SIGINT, these tests among it.
        "signal.signal(signal.SIGINT, signal.default_int_handler)"
    )
    ended = subprocess.run([sys.executable, "-c", f"{hidden}; {program}"], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")


def test_ignored_interrupts_stay_ignored_and_handlers_are_restored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ending_at_once():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with ending_at_once():
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_cleanup_on_sigterm_leaves_other_threads_and_own_handlers_alone():
    seen = []

    def look() -> None:
        with cleaning_up_when_terminated():
            seen.append(signal.getsignal(signal.SIGTERM))

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        look()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(look).result()
        assert seen == [signal.SIG_IGN, signal.SIG_DFL]
        look()
        assert callable(seen[-1]) and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_can_be_interrupted_before_its_imports(program):
    statements = ast.parse((ROOT / "src/manta/workers" / f"{program}.py").read_text()).body
    first = next(at for at, each in enumerate(statements) if isinstance(each, ast.If))
    assert ast.unparse(statements[first]) == (
        "if __name__ == '__main__':\n    from manta.workers.interruption import run_command\n"
        f"    run_command('manta.workers.{program.replace('/', '.')}')"
    )
    imported = [ast.unparse(each) for each in statements[:first] if isinstance(each, IMPORTS)]
    assert imported == ["from __future__ import annotations"]
