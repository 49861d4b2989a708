"""A real Prometheus with the configuration of `deploy/prometheus` scrapes a job to which something happens: every panel
of the dashboards has data, and every rule can be evaluated. The node's GPUs are those of a fake NVML (conftest.py)."""

import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from tests.deploy import monitoring
from tests.e2e.manta import EVERY_STEP, PAIR

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason=monitoring.NO_PROMETHEUS)


class Prometheus:
    """A running one, as its users see it."""

    def __init__(self, process: psutil.Popen, port: int):
        self.process = process
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=20)

    def query(self, expression: str) -> list[dict]:
        """The series that the expression has now."""
        answer = self._http.get("/query", params={"query": expression}).json()
        assert answer["status"] == "success", (expression, answer)
        return list(answer["data"]["result"])

    def rules(self) -> list[dict]:
        """All rules, with what came of them."""
        groups = self._http.get("/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]


def configured(folder: Path, target: str, key: str) -> Path:
    """The configuration as it is deployed, with another target, key file and pace."""
    document = yaml.safe_load((monitoring.PROMETHEUS / "prometheus.yml").read_text())
    (scrape,) = document["scrape_configs"]
    scrape["static_configs"] = [{"targets": [target]}]
    scrape["authorization"]["credentials_file"] = str(folder / "key")
    document["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (folder / "key").write_text(f"{key}\n")
    shutil.copy(monitoring.PROMETHEUS / "rules.yml", folder)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(document))
    return folder / "prometheus.yml"


def port_of(process: psutil.Popen) -> int | None:
    """Where it listens, once it does."""
    assert process.poll() is None, "Prometheus has ended"
    listening = [each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    return listening[0] if listening else None


@pytest.fixture
def prometheus(manta, tmp_path) -> Iterator[Prometheus]:
    """It scrapes the shared service with a key that may only read."""
    asked = {"name": "prometheus", "scope": "read", "installation": True}
    admin = {"Authorization": f"Bearer {manta.key}"}
    made = httpx.post(f"{manta.url}/v1/keys", json=asked, headers=admin, timeout=30).json()
    file = configured(tmp_path, manta.url.removeprefix("http://"), made["key"])
    options = [f"--config.file={file}", f"--storage.tsdb.path={tmp_path}/data", "--web.listen-address=127.0.0.1:0"]
    with (tmp_path / "log").open("wb") as log:
        process = psutil.Popen(["prometheus", *options], stdout=log, stderr=subprocess.STDOUT)
    try:
        yield Prometheus(process, manta.until("Prometheus listening", lambda: port_of(process)))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        httpx.delete(f"{manta.url}/v1/keys/{made['id']}", headers=admin, timeout=30)


def test_every_grafana_panel_has_data_after_a_recovery(manta, prometheus, kill: Callable[[int], None]):
    job = manta.submit(manta.spec(10_000, PAIR, checkpoint={**EVERY_STEP, "every_steps": 10}))
    manta.until_step(job, 5)
    kill(manta.pids(job)[1])
    manta.until_generation(job, 2)
    manta.leave_room(job)
    missing = [
        (dashboard, panel, query.replace("$job", job).replace("$__rate_interval", "20s"))
        for dashboard, panel, query in monitoring.queries()
    ]

    def all_have_data() -> bool:
        missing[:] = [each for each in missing if not prometheus.query(each[2])]
        return not missing

    try:
        manta.until("data for every panel", all_have_data)
    except AssertionError as error:
        raise AssertionError(f"{error}: {missing}") from None
    manta.until("a scrape", lambda: [each["value"][1] for each in prometheus.query('up{job="manta"}')] == ["1"])
    manta.until("all rules being tried", lambda: "unknown" not in [rule["health"] for rule in prometheus.rules()])
    assert [rule["name"] for rule in prometheus.rules() if rule["health"] != "ok"] == []
    assert len(prometheus.rules()) == len(monitoring.rules())
    manta.until("a rule of it", lambda: prometheus.query(f'job:manta_active:max{{job="{job}"}}'))
