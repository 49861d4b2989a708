"""Rules and dashboards name only what Manta tells, and whoever is called by an alert finds what to do."""

import re
import shutil
import subprocess

import pytest
import yaml

from deploy.grafana import make_dashboards
from tests.api.support.scraped_names import sample_names
from tests.deploy import monitoring
from tests.deploy.promql import metric_names

OF_OTHERS = {"up", "ALERTS", "process_resident_memory_bytes", "process_cpu_seconds_total"}
"""What Prometheus and its client library tell."""
promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason=monitoring.NO_PROMETHEUS)


def recorded():
    return {rule["record"] for rule in monitoring.rules() if "record" in rule}


@pytest.mark.parametrize("name", ["control-plane", "fleet", "job", "recovery"])
def test_grafana_dashboard_uses_existing_metrics_only(name):
    expressions = [query for dashboard, _, query in monitoring.queries() if dashboard == name]
    assert expressions
    assert set().union(*map(metric_names, expressions)) <= sample_names() | OF_OTHERS


def test_prometheus_rules_and_their_tests_use_existing_metrics_only():
    used = set().union(*(metric_names(rule["expr"]) for rule in monitoring.rules()))
    assert used <= sample_names() | OF_OTHERS | recorded()
    tests = yaml.safe_load((monitoring.PROMETHEUS / "rules_test.yml").read_text())["tests"]
    used = set().union(*(metric_names(series["series"]) for test in tests for series in test["input_series"]))
    assert used <= sample_names() | OF_OTHERS


@pytest.mark.parametrize("alert", monitoring.alerts(), ids=lambda alert: alert["alert"])
def test_alert_has_summary_severity_and_runbook_section(alert):
    name, annotations = alert["alert"], alert["annotations"]
    assert annotations["summary"] and annotations["description"]
    assert alert["labels"]["severity"] in ("warning", "critical")
    page, _, section = annotations["runbook_url"].partition("#")
    assert (monitoring.ROOT / page, section) == (monitoring.RUNBOOK, name.lower())
    assert f"\n## {name}\n" in monitoring.RUNBOOK.read_text()


def test_every_alert_has_a_runbook_section_and_a_test_of_firing_and_one_of_silence():
    tests = yaml.safe_load((monitoring.PROMETHEUS / "rules_test.yml").read_text())["tests"]
    outcomes = [
        (name, bool(case.get("exp_samples") or case.get("exp_alerts")))
        for test in tests
        for case in (*test.get("promql_expr_test", []), *test.get("alert_rule_test", []))
        for name in re.findall(r"Manta\w+", case.get("expr", "") or case.get("alertname", ""))
    ]
    names = {alert["alert"] for alert in monitoring.alerts()}
    assert {name for name, fires in outcomes if fires} == names
    assert {name for name, fires in outcomes if not fires} == names
    assert set(re.findall(r"^## (Manta\w+)$", monitoring.RUNBOOK.read_text(), re.MULTILINE)) == names


def test_grafana_dashboards_match_the_script_that_makes_them():
    for path, text in make_dashboards.as_files().items():
        assert path.read_text() == text, "run: python deploy/grafana/make_dashboards.py"
    assert len(monitoring.dashboards()) == len(make_dashboards.DASHBOARDS) == 4


def test_grafana_provisioning_uses_the_datasource_of_the_dashboards():
    folder = monitoring.GRAFANA / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((folder / "dashboards" / "manta.yml").read_text())["providers"]
    assert source["uid"] == make_dashboards.DATASOURCE["uid"]
    assert provider["type"] == "file"


@promtool
@pytest.mark.parametrize(
    "arguments",
    [("check", "rules", "rules.yml"), ("test", "rules", "rules_test.yml")],
    ids=["rules are well formed", "alerts fire when they should"],
)
def test_promtool_accepts_the_alert_rules_and_their_tests(arguments):
    done = subprocess.run(["promtool", *arguments], cwd=monitoring.PROMETHEUS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_prometheus_configuration_is_valid(tmp_path):
    key = tmp_path / "key"
    key.write_text("secret")
    text = (monitoring.PROMETHEUS / "prometheus.yml").read_text()
    (tmp_path / "rules.yml").write_text((monitoring.PROMETHEUS / "rules.yml").read_text())
    (tmp_path / "prometheus.yml").write_text(text.replace("/run/secrets/prometheus.key", str(key)))
    done = subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
