"""Containers without an engine: each is a tree of processes in namespaces of its own (network, processes, mounts, host
name, IPC), in a root of its own that has of this machine only what is installed, as the user, with the environment, the
mounts, the folders in memory and without the privileges that its record says.

What only an engine can show stays open: images, limits of processor and memory, seccomp.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from tests.deploy.records import Container, WayIn
from tests.e2e.images import Image, image_of
from tests.e2e.machines import ROOT
from tests.e2e.manta import SECONDS
from tests.e2e.network import Network

POLL_SECONDS = 1.0
"""Each look starts a program for each container that is not yet healthy."""
UP_SECONDS, STOP_SECONDS = 500.0, 90.0
MAX_RESTARTS = 3
AT_ONCE = 2
"""How many start at a time: Ray gives a node 30 s to start, which a busy machine may not hold."""
ETC = ("alternatives", "group", "ld.so.cache", "localtime", "mime.types", "nsswitch.conf", "ssl")
DEVICES = ("full", "null", "random", "tty", "urandom", "zero")
FOLDERS = ("dev/shm", "etc", "home", "opt", "proc", "root", "run", "sys", "tmp", "usr", "var/lib")
RULES = """
table inet others {{}}
delete table inet others
table inet others {{
  chain input {{
    type filter hook input priority 0; policy drop;
    ct state established,related accept
    iif lo accept
    {closed}
    {ways_in}
  }}
}}
"""


class NotHealthy(Exception):
    """A container that ended, or whose health check never succeeded."""


class Containers:
    """What an engine would have: the containers of one file, on networks as it says."""

    def __init__(self, network: Network, folder: Path, containers: Mapping[str, Container], base: Path = ROOT,
                 on_request: Collection[str] = ()):  # fmt: skip
        """`folder`: where roots, volumes and logs are; `base`: the folder that relative mounts are in; `on_request`:
        those that `up` does not start. Containers whose image nothing here can stand for are left out (`left_out`)."""
        self._network, self._folder, self._base = network, folder, base
        self.left_out = [name for name, each in containers.items() if image_of(each.image) is None]
        self._records = {name: each for name, each in containers.items() if name not in self.left_out}
        self._cables = {}
        for name in sorted(
            self._records, key=lambda name: (self._records[name].address is None, self._records[name].address)
        ):
            self._cables[name] = network.plug_in()
            assert self._records[name].address in (None, self._cables[name].address)
        self._on_request = set(on_request)
        self._restarts: Counter[str] = Counter()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        for name in self._records:
            self._close_network_of(name)

    def address(self, name: str) -> str:
        """The IP address of a container."""
        return self._cables[name].address

    def up(self) -> None:
        """Start all, each after those that it needs, and return when all are healthy, or have ended as they should.
        Raises NotHealthy."""
        done: set[str] = set()
        deadline = time.monotonic() + UP_SECONDS
        while waiting := set(self._records) - self._on_request - done:
            for name in [each for each in self._records if each in waiting]:
                needs = {each for need in self._records[name].needs for each in self._named(need)}
                starting = set(self._running) - done
                if name not in self._running and needs <= done and len(starting) < AT_ONCE:
                    self.start(name)
                if name in self._running and self.is_done(name):
                    done.add(name)
            for name in done:
                if not self._records[name].once and self._running[name].poll() is not None:
                    self._start_again(name)
            if time.monotonic() > deadline:
                logs = [f"{name}: {self.log(name)[-2000:]}" for name in sorted(self._running)]
                raise NotHealthy("\n".join([f"{sorted(waiting)} are not healthy", *logs]))
            time.sleep(POLL_SECONDS)

    def _named(self, service: str) -> list[str]:
        """The containers of a service, which may have several; those left out count as there."""
        return [name for name in self._records if name == service or name.rpartition("-")[0] == service]

    def start(self, name: str) -> None:
        """One of them."""
        record = self._records[name]
        with (self._folder / f"{name}.log").open("ab") as output:
            self._running[name] = subprocess.Popen(
                self._entered(record),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                start_new_session=True,
            )

    def _start_again(self, name: str) -> None:
        self._restarts[name] += 1
        if self._restarts[name] > MAX_RESTARTS:
            raise NotHealthy(f"{name} ends again and again: {self.log(name)[-4000:]}")
        self.start(name)

    def is_done(self, name: str) -> bool:
        """Whether it is healthy or, where it is to end, has ended well. Any other that has ended is started again.
        Raises NotHealthy where it must not have ended so."""
        code = self._running[name].poll()
        if self._records[name].once:
            if code not in (None, 0):
                raise NotHealthy(f"{name} ended with {code}: {self.log(name)[-4000:]}")
            return code == 0
        if code is not None:
            self._start_again(name)
        return self.health(name).returncode == 0

    def health(self, name: str) -> subprocess.CompletedProcess[str]:
        """Run its health check, or where something else stands for its image, that one's."""
        record = self._records[name]
        check = self._image(record).health or record.health
        assert check is not None, f"{name} has no health check"
        try:
            return self.run(name, *check)
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(check, 124, "", "no answer in time")

    def run(self, name: str, *command: str, seconds: float = 20.0) -> subprocess.CompletedProcess[str]:
        """Run a command in a container that runs, as its user, with its environment."""
        first = self._first_process(name)
        if first is None:
            return subprocess.CompletedProcess(command, 125, "", f"{name} does not run")
        enter = ["nsenter", f"--target={first}", "--mount", "--uts", "--ipc", "--net", "--pid", "--root"]
        words = [*enter, *self._as_user(self._records[name]), *command]
        return subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False, cwd="/",
            start_new_session=True,
        )  # fmt: skip

    def once(
        self, name: str, *arguments: str, text: str = "", seconds: float = SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """Run another container of a record, with these arguments in the place of its own, to its end."""
        record = self._records[name]
        record = replace(record, command=(*record.command[: record.entrypoint_words], *arguments))
        return subprocess.run(
            self._entered(record), input=text, capture_output=True, text=True, timeout=seconds, check=False, cwd="/"
        )

    @contextlib.contextmanager
    def closed(self, name: str, ports: str) -> Iterator[None]:
        """Meanwhile nobody gets a new connection to these ports of a container, such as 20000-20199."""
        self._close_network_of(name, f"tcp dport {ports} drop")
        try:
            yield
        finally:
            self._close_network_of(name)

    def names(self) -> list[str]:
        """Those that run."""
        return [name for name, process in self._running.items() if process.poll() is None]

    def record(self, name: str) -> Container:
        """What was read about one."""
        return self._records[name]

    def _first_process(self, name: str) -> int | None:
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self._running[name].pid).children()
            return children[0].pid if children else None
        return None

    def stop(self, name: str) -> int:
        """End it as an engine does, and return what it ended with. Raises NotHealthy where what is to be run before did
        not succeed."""
        before = self._records[name].before_stop
        done = self.run(name, *before, seconds=STOP_SECONDS) if before else None
        if done is not None and done.returncode != 0:
            raise NotHealthy(f"{' '.join(before)} in {name}: {done.stderr}{done.stdout}")
        return self._end(name, getattr(signal, self._records[name].stop_signal))

    def kill(self, name: str) -> None:
        """kill -9 of its first process: the kernel ends all others in it."""
        self._end(name, signal.SIGKILL)

    def _end(self, name: str, with_signal: signal.Signals) -> int:
        first, process = self._first_process(name), self._running[name]
        if first is not None:
            os.kill(first, with_signal)
        code = process.wait(STOP_SECONDS)
        del self._running[name]
        return code

    def log(self, name: str) -> str:
        """What it has printed."""
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def processes(self, *names: str) -> list[psutil.Process]:
        """All that run in one of them, or in one of `names`."""
        cables = [self._cables[name] for name in names or self._cables]
        spaces = {Path(f"/run/netns/{cable.namespace}").stat().st_ino for cable in cables}
        return [each for each in psutil.process_iter() if _network_of(each) in spaces]

    def close(self) -> None:
        """Leave nothing of them."""
        for name in list(self._running):
            if self._running[name].poll() is None:
                self.kill(name)
        for cable in self._cables.values():
            cable.close()

    def _image(self, record: Container) -> Image:
        image = image_of(record.image)
        assert image is not None
        return image

    def _peers(self, record: Container) -> list[str]:
        """Those that it reaches, and that reach it."""
        return [name for name, each in self._records.items() if each.networks & record.networks]

    def _close_network_of(self, name: str, closed: str = "") -> None:
        record, cable = self._records[name], self._cables[name]
        ways = record.ways_in
        if ways is None:
            ways = tuple(WayIn(each) for each in self._peers(record))
        rules = [_rule(self._cables[each.source].address, each.ports) for each in ways if each.source in self._cables]
        if record.published:
            rules.append(_rule(self._network.address, [(each, each) for each in record.published]))
        text = RULES.format(ways_in="\n    ".join(rules), closed=closed)
        nft = ["ip", "netns", "exec", cable.namespace, "nft", "-f", "-"]
        subprocess.run(nft, input=text, text=True, check=True, capture_output=True)

    def _entered(self, record: Container) -> list[str]:
        """The command that makes the container's namespaces, its root, and becomes its first process."""
        image = self._image(record)
        command = image.command or (*image.entrypoint, *(record.command or image.arguments))
        init = ["tini", "--"] if record.init else []
        namespaces = [
            "unshare",
            "--mount",
            "--uts",
            "--ipc",
            "--pid",
            "--fork",
            "--kill-child",
            "--propagation",
            "private",
        ]
        root = self._folder / "roots" / record.name
        root.mkdir(parents=True, exist_ok=True)
        enter = ["chroot", str(root), *self._as_user(record), *init, *command]
        cable = self._cables[record.name]
        network = ["setpriv", "--pdeathsig=KILL", "ip", "netns", "exec", cable.namespace]
        return [*network, *namespaces, "sh", "-ec", self._set_up(record, image, root), *enter]

    def _as_user(self, record: Container) -> list[str]:
        """Words before a command: whose rights it has, and what it finds in its environment."""
        image = self._image(record)
        assert record.user is not None and record.group is not None, f"{record.name} names no user"
        # KILL: --kill-child of unshare is forgotten where the user changes.
        rights = ["setpriv", "--pdeathsig=KILL", f"--reuid={record.user}", f"--regid={record.group}", "--clear-groups"]
        rights += [] if record.new_privileges else ["--no-new-privs"]
        rights += [] if record.capabilities else ["--inh-caps=-all", "--bounding-set=-all"]
        environment = {**image.environment, **record.environment}
        words = [f"{key}={value}" for key, value in environment.items()]
        return [*rights, "env", "--ignore-environment", f"--chdir={image.folder}", *words]

    def _set_up(self, record: Container, image: Image, root: Path) -> str:
        """A shell script that puts the container's root together, and becomes the words after it."""
        at = shlex.quote(str(root))
        steps = [f"hostname {record.name}", f"mount -t tmpfs -o mode=0755,size=64m tmpfs {at}"]
        steps.append("mkdir -p " + " ".join(f"{at}/{each}" for each in FOLDERS))
        steps.append(f"ln -s ../run {at}/var/run; mount --rbind /usr {at}/usr; mount -o remount,bind,ro {at}/usr")
        steps.append(f"for each in bin sbin lib lib64; do cp -a /$each {at}/$each; done")
        steps += [f"[ ! -e /etc/{each} ] || cp -a /etc/{each} {at}/etc/" for each in ETC]
        steps.append(f"mount -t proc proc {at}/proc; mount --rbind /sys {at}/sys; ln -s /proc/self/fd {at}/dev/fd")
        steps += [f"touch {at}/dev/{each}; mount --bind /dev/{each} {at}/dev/{each}" for each in DEVICES]
        steps.append(f"mount -t tmpfs -o mode=1777,size={record.shared_memory} tmpfs {at}/dev/shm")
        owner = f"-o {record.user} -g {record.group} -m 0700"
        steps += [f"install -d {owner} {root}{each}" for each in image.folders]
        for folder, options in record.temporary.items():
            flags = "nosuid,nodev" + ("" if "exec" in options.split(",") else ",noexec")
            inside = shlex.quote(f"{root}{folder}")
            steps.append(f"mkdir -p {inside}; mount -t tmpfs -o {flags},{options or 'mode=1777'} tmpfs {inside}")
        for path, target in [*((each, each) for each in _installation()), *((v, k) for k, v in image.links.items())]:
            steps += _bound(path, f"{root}{target}", is_folder=True, read_only=True)
        steps += [f"mount -t tmpfs -o mode=0755,size=4k tmpfs {root}{each}" for each in image.hidden]
        for mount in record.mounts:
            source = self._source(record, mount.source)
            steps += _bound(str(source), f"{root}{mount.target}", source.is_dir(), mount.read_only)
        steps += [f"printf %s {shlex.quote(text)} >{at}/etc/{name}" for name, text in self._files(record).items()]
        return "; ".join([*steps, f"mount -o remount,ro {at}" if record.read_only else ":", 'exec "$0" "$@"'])

    def _files(self, record: Container) -> dict[str, str]:
        """What an engine writes into /etc, and the names that the image has for its users."""
        hosts = [f"{self._cables[each].address} {each}" for each in self._peers(record)]
        own = f"{self.address(record.name)} {record.name}"
        users = f"root:x:0:0::/root:/bin/sh\ncontainer:x:{record.user}:{record.group}::/:/bin/sh\n"
        return {"hosts": "\n".join(["127.0.0.1 localhost", own, *hosts, ""]), "passwd": users}

    def _source(self, record: Container, source: str) -> Path:
        """Where a mount is here; a volume belongs to the first user who has it, as an image has its folder."""
        if source.startswith(("/", ".")):
            return (self._base / source).resolve()
        volume = self._folder / "volumes" / source
        if not volume.exists():
            volume.mkdir(parents=True, mode=0o700)
            os.chown(volume, record.user or 0, record.group or 0)
        return volume


def _rule(source: str, ports: Sequence[tuple[int, int]]) -> str:
    ranges = ", ".join(f"{first}-{last}" for first, last in ports)
    return f"ip saddr {source} {f'tcp dport {{ {ranges} }} ' if ranges else ''}accept"


def _network_of(process: psutil.Process) -> int | None:
    with contextlib.suppress(OSError):  # it has ended
        return Path(f"/proc/{process.pid}/ns/net").stat().st_ino
    return None


def _bound(source: str, target: str, is_folder: bool, read_only: bool) -> list[str]:
    from_, to = shlex.quote(source), shlex.quote(target)
    made = f"mkdir -p {to}" if is_folder else f"mkdir -p {shlex.quote(str(Path(target).parent))}; touch {to}"
    return [made, f"mount --bind {from_} {to}", *([f"mount -o remount,bind,ro {to}"] if read_only else [])]


def _installation() -> list[str]:
    """Folders of the interpreter, of what is installed for it, and of ourselves, where they are not in /usr."""
    folders: Sequence[Path] = [ROOT, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()]
    outside = {each for each in folders if not each.is_relative_to("/usr")}
    return sorted(
        str(each) for each in outside if not any(each != other and each.is_relative_to(other) for other in outside)
    )
