"""File systems that are soon full."""

import contextlib
import subprocess

import pytest


@contextlib.contextmanager
def small_file_system(folder, kilobytes):
    """Mount one of so many kilobytes at `folder`; skips the test where that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    options = ["-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    done = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
