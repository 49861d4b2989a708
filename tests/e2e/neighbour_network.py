"""Another machine on the network of this one: a network namespace with an address of its own."""

import contextlib
import json
import shutil
import subprocess
import sys
import uuid

import pytest

HERE, THERE = "198.18.77.1", "198.18.77.2"
"""This machine's address and the neighbour's, out of the range for tests of network devices (RFC 2544)."""
SILENT_SECONDS = 1.0
# Runs in the neighbour's namespace: a TCP connection to each port of an address, and which of them were accepted.
SCAN = """
import json, selectors, socket, sys

address, open_ports, waiting = sys.argv[1], [], selectors.DefaultSelector()
ports = iter(json.load(sys.stdin))
left = True
while left or waiting.get_map():
    while left and len(waiting.get_map()) < 500:
        port = next(ports, None)
        if port is None:
            left = False
            break
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex((address, port))
        waiting.register(connection, selectors.EVENT_WRITE, port)
    for key, _ in waiting.select():
        if key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
            open_ports.append(key.data)
        waiting.unregister(key.fileobj)
        key.fileobj.close()
print(json.dumps(open_ports))
"""
# Says the first words of a protocol to a port, and prints what comes back, as hexadecimal digits.
SPEAK = """
import contextlib, socket, sys

try:
    connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=30)
except ConnectionRefusedError:  # who listened there has ended, as idle workers of Ray do
    sys.exit()
connection.sendall(bytes.fromhex(sys.argv[3]))
with contextlib.suppress(OSError):  # it says nothing, or hangs up
    connection.settimeout(float(sys.argv[4]))
    print(connection.recv(65536).hex())
"""


class Neighbour:
    """What somebody on another machine can do who knows this one's address, and nothing else."""

    def __init__(self, namespace):
        self._inside = ["ip", "netns", "exec", namespace, sys.executable, "-c"]

    def open_ports(self, address, ports):
        """Those of `ports` at `address`, which is this machine's, that accept a connection."""
        return json.loads(self._run(SCAN, address, said=json.dumps(list(ports))))

    def speak(self, address, port, words):
        """The first that the process says which listens there, after it heard `words`; empty when it says nothing."""
        return bytes.fromhex(self._run(SPEAK, address, str(port), words.hex(), str(SILENT_SECONDS)))

    def _run(self, program, *arguments, said=""):
        command = [*self._inside, program, *arguments]
        return subprocess.run(command, input=said, capture_output=True, text=True, check=True).stdout.strip()


@contextlib.contextmanager
def neighbour():
    """One that is gone afterwards; skips the test where network namespaces are not allowed."""
    if shutil.which("ip") is None:
        pytest.skip("no network namespace without the program ip (iproute2)")
    tag = uuid.uuid4().hex[:8]  # namespaces are the machine's: other runs of the tests may have theirs
    namespace, here, there = f"manta-neighbour-{tag}", f"mh{tag}", f"mt{tag}"
    try:
        _ip(f"netns add {namespace}")
        _ip(f"link add {here} type veth peer name {there} netns {namespace}")
    except subprocess.CalledProcessError as error:
        subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
        pytest.skip(f"a network namespace cannot be made here: {error.stderr.strip()}")
    try:
        _ip(f"addr add {HERE}/30 dev {here}")
        _ip(f"link set {here} up")
        _ip(f"-n {namespace} addr add {THERE}/30 dev {there}")
        _ip(f"-n {namespace} link set {there} up")
        _ip(f"-n {namespace} route add default via {HERE}")  # to all other addresses of this machine
        yield Neighbour(namespace)
    finally:
        _ip(f"netns del {namespace}")  # with both ends of the link


def _ip(words):
    subprocess.run(["ip", *words.split()], capture_output=True, text=True, check=True)
