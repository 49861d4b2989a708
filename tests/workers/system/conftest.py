"""Machines, by their files."""

import pytest


@pytest.fixture
def machine_files(tmp_path):
    """Writes the files of a machine: by path, and the membership of this process in control groups; their folder."""

    def make(membership=None, **files):
        if membership is not None:
            files["proc/self/cgroup"] = membership
        for path, content in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(content + "\n")
        return tmp_path

    return make
