"""File systems that are soon full, or read-only."""

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


@contextlib.contextmanager
def read_only(folder):
    """Nothing in `folder`, which is on a small file system, can be made or opened for writing meanwhile."""
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
