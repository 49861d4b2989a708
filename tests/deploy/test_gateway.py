"""What the gateway of docker-compose.yml does with requests, with HAProxy in front of servers that are none of ours."""

import contextlib
import http.server
import json
import re
import socket
import subprocess
import threading
import urllib.error
import urllib.request

import pytest

from manta.api.security.request_guard import OwnAddresses, refusal
from manta.api.streams import KEEPALIVE_SECONDS, MAX_WAIT_SECONDS
from manta.api.threads import FILE_SECONDS
from tests.deploy import compose_file
from tests.deploy.compose_file import ROOT
from tests.e2e.images import missing_programs

CONFIGURATION = ROOT / "deploy" / "compose" / "haproxy.cfg"
PLANES = ("control-1", "control-2")
SECONDS = 20.0


class Plane(http.server.ThreadingHTTPServer):
    """Answers everything with its name, and its readiness as it is told to."""

    def __init__(self, name):
        super().__init__(("127.0.0.1", 0), Answers)
        self.name, self.is_ready = name, True
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if self.path == "/readyz" and not self.server.is_ready else 200)
        self.send_header("Content-Length", str(len(self.server.name)))
        self.end_headers()
        self.wfile.write(self.server.name.encode())

    def do_POST(self):
        said = json.dumps({name.lower(): value for name, value in self.headers.items()}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_):
        pass


def free_ports(count):
    """So many different ones."""
    with contextlib.ExitStack() as until_all_are_known:
        taken = [until_all_are_known.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in taken]


@pytest.fixture
def planes():
    made = {name: Plane(name) for name in PLANES}
    yield made
    for each in made.values():
        each.shutdown()
        each.server_close()


@pytest.fixture
def ask(planes, tmp_path):
    """Asks the gateway for the list of jobs: the status, and which control plane has answered, or what it was sent."""
    for reason in missing_programs():
        pytest.skip(reason)
    (port, grafana, health), text = free_ports(3), CONFIGURATION.read_text(encoding="utf-8")
    for old, new in (
        (":8400 ssl crt /run/secrets/tls.pem alpn h2,http/1.1", f"127.0.0.1:{port}"),
        (":3000 ssl crt /run/secrets/tls.pem alpn h2,http/1.1", f"127.0.0.1:{grafana}"),
        ("127.0.0.1:8401", f"127.0.0.1:{health}"),
        ("grafana:3000", "127.0.0.1:1"),
        ("inter 2s", "inter 50ms"),
        ("timeout connect 5s", "timeout connect 5s\n    timeout check 10s"),  # otherwise it is `inter`
        *((f"{name}:8400", f"127.0.0.1:{plane.server_port}") for name, plane in planes.items()),
    ):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "haproxy.cfg").write_text(text, encoding="utf-8")
    with subprocess.Popen(["haproxy", "-db", "-f", tmp_path / "haproxy.cfg"], stdout=-3, stderr=-3) as gateway:

        def get(**request):
            asked = urllib.request.Request(f"http://127.0.0.1:{port}/v1/jobs", **request)
            try:
                with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as error:
                return error.code, None
            except urllib.error.URLError:  # it is not up yet
                return None, None

        yield get
        gateway.terminate()


def until(seen, wanted):
    for _ in range(400):
        if wanted(answer := seen()):
            return answer
        threading.Event().wait(0.05)
    raise AssertionError(answer)


def test_gateway_waits_for_longer_than_the_service_takes_or_is_silent():
    (seconds,) = re.findall(r"^ *timeout server (\d+)s$", CONFIGURATION.read_text(encoding="utf-8"), re.MULTILINE)
    assert int(seconds) > max(MAX_WAIT_SECONDS, FILE_SECONDS, KEEPALIVE_SECONDS)


def test_gateway_routes_to_ready_control_planes_or_to_all_if_none_is_ready(planes, ask):
    planes["control-1"].is_ready = False
    until(lambda: {ask() for _ in range(5)}, lambda answers: answers == {(200, "control-2")})
    planes["control-2"].is_ready = False  # as all are while Ray, or the database, does not answer
    until(lambda: {ask() for _ in range(5)}, lambda answers: answers == {(200, name) for name in PLANES})
    assert {ask()[0] for _ in range(50)} == {200}
    planes["control-1"].is_ready = True
    until(lambda: {ask() for _ in range(5)}, lambda answers: answers == {(200, "control-1")})


@pytest.mark.parametrize("name", ["", "train.example.org"])
def test_gateway_lets_only_pages_of_the_published_address_change_state(ask, name):
    until(ask, lambda answer: answer[0] == 200)
    variables = dict.fromkeys(compose_file.required_variables(compose_file.FILE.read_text()), "x")
    environment = compose_file.containers({**variables, "MANTA_NAME": name})["control-1"].environment
    ours = OwnAddresses.of(["control-1"], environment["MANTA_ALLOWED_HOSTS"].split(","), by_tls=True)
    host = name or "localhost"

    def refused(origin):
        headers = {"Host": f"{host}:8400", "Origin": origin, "X-Forwarded-Proto": "http"}
        arrived = json.loads(ask(method="POST", data=b"", headers=headers)[1])
        answer = refusal("POST", "/v1/jobs/job_0/cancel", arrived, ours, arrived["x-forwarded-proto"])
        return answer and answer.kind.code

    assert refused(f"https://{host}:8400") is None
    for origin in (f"https://{host}:3000", f"https://{host}", f"http://{host}:8400", "https://control-1", "null"):
        assert refused(origin) == "cross_site", origin
