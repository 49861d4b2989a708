"""File systems that are soon full, or read-only."""

import contextlib
import os
import subprocess

import pytest


@contextlib.contextmanager
def small_file_system(folder, kilobytes):
    """Mount one of so many kilobytes at `folder`; skips the test where that is not allowed."""
    with small_where_allowed(folder, kilobytes):
        skip_unless_mounted(folder)
        yield


@contextlib.contextmanager
def small_where_allowed(folder, kilobytes):
    """Mount one of so many kilobytes at `folder`, or leave the folder as it is where that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    options = ["-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    done = subprocess.run(["mount", *options], capture_output=True, check=False)
    try:
        yield
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def skip_unless_mounted(folder):
    """Skip the test where `folder` is no file system of its own."""
    if not os.path.ismount(folder):
        pytest.skip("a file system cannot be mounted here")


@contextlib.contextmanager
def read_only(folder):
    """Nothing in `folder`, which is on a small file system, can be made or opened for writing meanwhile."""
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
