"""The mark of a code changes with every change of it, and with nothing else."""

import pytest

from manta.workers.node import host as module


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    (tmp_path / "one.py").write_text("x = 1\n")
    (tmp_path / "inner" / "two.py").write_text("y = 2\n")
    monkeypatch.setattr(module, "PACKAGE", tmp_path)
    return tmp_path


def mark():
    return module.own_code.__wrapped__()


def test_code_mark_changes_exactly_with_the_source_files(package):
    before = mark()
    assert len(before) == 16
    (package / "inner" / "notes.txt").write_text("no code")
    assert mark() == before
    (package / "inner" / "two.py").write_text("y = 3\n")
    assert mark() != before
    (package / "inner" / "two.py").write_text("y = 2\n")
    assert mark() == before
    (package / "inner" / "two.py").rename(package / "inner" / "three.py")
    assert mark() != before


def test_code_mark_of_the_installed_package_is_hexadecimal():
    assert int(module.own_code(), 16) >= 0
