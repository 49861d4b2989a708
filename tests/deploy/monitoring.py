"""What lies in `deploy/` for Prometheus and Grafana, read once."""

import json
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
PROMETHEUS, GRAFANA = ROOT / "deploy" / "prometheus", ROOT / "deploy" / "grafana"
RUNBOOK = ROOT / "docs" / "runbook.md"
NO_PROMETHEUS = "prometheus and promtool are not installed (Debian: prometheus)"


def rules() -> list[dict[str, Any]]:
    """Recorded ones and alerts."""
    groups = yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    """Those of the rules that are alerts."""
    return [rule for rule in rules() if "alert" in rule]


def dashboards() -> dict[str, dict[str, Any]]:
    """The JSON models by the names of their files."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((GRAFANA / "dashboards").glob("*.json"))}


def queries() -> list[tuple[str, str, str]]:
    """Dashboard, title of the panel, and PromQL, of all panels."""
    return [
        (name, panel["title"], target["expr"])
        for name, dashboard in dashboards().items()
        for panel in dashboard["panels"]
        for target in panel["targets"]
    ]
