"""Machines of their own, as far as one machine allows: each has an address, a name, a user, a home, a /tmp and a shared
memory that no other one has, and sees what is installed there.

A machine is a network namespace on the bridge of `network.Network`, and a mount namespace for each process that is
started on it, all over the same folders.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.e2e.network import Network
from tests.e2e.other_ray import RayMismatch

ROOT = Path(__file__).resolve().parents[2]
SHARED_MEMORY_MEGABYTES = 300
FIRST_USER = 61000
PRIVATE = ("/tmp", "/root", "/home", "/dev/shm")
"""Folders of which each machine has its own."""
SECRET_NAMES = ("MANTA_", "RAY_", "AWS_", "PYTHONPATH", "XDG_")
"""Starts of the names of variables that the tests' own environment does not pass on."""


RULES = """
table inet others {{}}
delete table inet others
table inet others {{
  chain input {{
    type filter hook input priority 0; policy drop;
    ct state established,related accept
    iif lo accept
    tcp dport {{ {ports} }} accept
  }}
}}
"""


class Machine:
    """One machine. What was started on it ends with `power_off`."""

    def __init__(
        self,
        network: Network,
        name: str,
        folder: Path,
        hidden: Sequence[Path] = (),
        other: RayMismatch | None = None,
    ):
        """`folder`: on the real machine, where this one's disk is; `hidden`: folders and files of the installation that
        this machine does not have; `other`: its Ray,
        where it has one of its own."""
        self._other, self._is_closed = other, False
        network.plugged_in.append(self)  # closed with it, where whoever started it could not
        self.cable, self.name, self.hidden = network.plug_in(), name, tuple(hidden)
        self.user = FIRST_USER + int(self.address.rpartition(".")[2])
        self.disk = folder / name
        for private in PRIVATE[:-1]:
            (self.disk / private[1:]).mkdir(parents=True)
            (self.disk / private[1:]).chmod(0o1777)
        self.home = f"/home/{name}"
        (self.disk / self.home[1:]).mkdir()
        os.chown(self.disk / self.home[1:], self.user, self.user)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._memory = Path(f"/dev/shm/{self.cable.namespace}")
        self._memory.mkdir(mode=0o755)
        _mount("-t", "tmpfs", "-o", f"size={SHARED_MEMORY_MEGABYTES}m,mode=1777", "tmpfs", str(self._memory))

    @property
    def address(self) -> str:
        """Its IP address."""
        return self.cable.address

    @property
    def output(self) -> Path:
        """The file with what was printed there."""
        return self.disk / "output.log"

    def path(self, inside: str) -> Path:
        """Where a file of this machine's own folders lies on the real one."""
        if inside.startswith("/dev/shm/"):
            return self._memory / inside.removeprefix("/dev/shm/")
        return self.disk / inside.lstrip("/")

    def start(self, *command: str, log: Path | None = None, **environment: str) -> subprocess.Popen[bytes]:
        """A process on this machine, of its user."""
        with (log or self.output).open("ab") as output:
            process = subprocess.Popen(
                self._entered(command),
                env=self._environment(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd="/",
            )
        self._processes.append(process)
        return process

    def run(self, *command: str, seconds: float = 60.0, **environment: str) -> subprocess.CompletedProcess[str]:
        """The same, to its end."""
        return subprocess.run(
            self._entered(command),
            env=self._environment(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd="/",
            timeout=seconds,
            check=False,
        )

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(SECRET_NAMES)}
        return {**inherited, "HOME": self.home, "USER": self.name, "RAY_USAGE_STATS_ENABLED": "0", **more}

    def _entered(self, command: Sequence[str]) -> list[str]:
        user = ["setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups"]
        inside = ["unshare", "--mount", "--uts", "--propagation", "private"]
        entry = ["sh", "-ec", self._set_up(), self.name, *user, *command]
        return ["ip", "netns", "exec", self.cable.namespace, *inside, *entry]

    def _set_up(self) -> str:
        """A shell script that gives the process its machine, and becomes the words after it."""
        steps = ['hostname "$0"']
        # What lies below a folder that is replaced is carried through: the installation, wherever it is.
        installed = _installation() + ([] if self._other is None else [self._other.folder])
        kept = [path for path in installed if any(path.is_relative_to(folder) for folder in PRIVATE)]
        disk = shlex.quote(str(self.disk))
        steps += ["mount -t tmpfs tmpfs /mnt", f"mkdir /mnt/disk; mount --rbind {disk} /mnt/disk"]
        for number, path in enumerate(kept):
            steps += [f"mkdir /mnt/{number}", f"mount --rbind {shlex.quote(str(path))} /mnt/{number}"]
        for folder in PRIVATE[:-1]:
            steps.append(f"mount --bind /mnt/disk{folder} {folder}")
        steps.append(f"mount --bind {self._memory} /dev/shm")
        for number, path in enumerate(kept):
            steps += [f"mkdir -p {shlex.quote(str(path))}", f"mount --move /mnt/{number} {shlex.quote(str(path))}"]
        for path in self.hidden:
            steps.append(f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(path))}")
        return "; ".join([*steps, 'exec "$@"'])

    def python(self, *arguments: str) -> list[str]:
        """Words of a command that runs its Python."""
        return [sys.executable if self._other is None else self._other.python, *arguments]

    def let_in(self, ports: Sequence[str]) -> None:
        """From now on others reach these TCP ports (numbers, or ranges such as 20000-20999) and nothing else here."""
        rules = RULES.format(ports=", ".join(ports))
        nft = ["ip", "netns", "exec", self.cable.namespace, "nft", "-f", "-"]
        subprocess.run(nft, input=rules, text=True, check=True, capture_output=True)

    def processes(self) -> list[psutil.Process]:
        """All that runs on it."""
        namespace = Path(f"/run/netns/{self.cable.namespace}").stat().st_ino
        here: list[psutil.Process] = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if Path(f"/proc/{process.pid}/ns/net").stat().st_ino == namespace:
                    here.append(process)
        return here

    def power_off(self) -> None:
        """kill -9 of everything; what was in memory and in /tmp is lost."""
        while processes := [each for each in self.processes() if each.status() != psutil.STATUS_ZOMBIE]:
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes, 10)
        for started in self._processes:
            started.wait(10)
        self._processes.clear()
        for entry in (*self._memory.iterdir(), *(self.disk / "tmp").iterdir()):
            _remove(entry)

    def close(self) -> None:
        """Leave nothing of it; a second time there is nothing left to do."""
        if self._is_closed:
            return
        self._is_closed = True
        self.power_off()
        subprocess.run(["umount", "--lazy", str(self._memory)], check=True, capture_output=True)
        self._memory.rmdir()
        self.cable.close()


def _installation() -> list[Path]:
    """Folders that every machine has at the same paths: the interpreter, what is installed for it, and ourselves."""
    folders = {ROOT, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}
    return [each for each in folders if not any(each != other and each.is_relative_to(other) for other in folders)]


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True, capture_output=True)


def _remove(entry: Path) -> None:
    subprocess.run(["rm", "-rf", "--", str(entry)], check=True)
