"""Another version of Ray than the one that is installed, for processes of their own."""

from __future__ import annotations

import site
import subprocess
import sys
from pathlib import Path

VERSION = "import importlib.metadata as installed; print(installed.version('ray'))"


class RayMismatch:
    """A virtual environment that has a Ray of its own, and all else from this one."""

    def __init__(self, folder: Path, wanted: str):
        """Installs `wanted`, a requirement such as ray==2.52.0, in `folder`. Without a version it is the newest that
        the package index has."""
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
        packages = next(folder.glob("lib/python*/site-packages"))
        ours = "; ".join(f"site.addsitedir({each!r})" for each in site.getsitepackages())
        (packages / "ours.pth").write_text(f"import site; {ours}\n")
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install", "-q", "--disable-pip-version-check"]
        done = subprocess.run([*pip, "--upgrade", wanted], capture_output=True, text=True, timeout=600, check=False)
        self.unavailable = done.stderr.strip() if done.returncode else None
        """Why it could not be installed."""

    @property
    def python(self) -> str:
        """Path of its interpreter."""
        return str(self.folder / "bin" / "python")

    @property
    def version(self) -> str:
        """Of its Ray."""
        done = subprocess.run([self.python, "-c", VERSION], capture_output=True, text=True, check=True, timeout=60)
        return done.stdout.strip()
