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


def test_same_sources_have_the_same_mark_and_others_another(package):
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


def test_real_code_has_a_mark():
    assert int(module.own_code(), 16) >= 0
