"""As much of the Kubernetes API as `helm install --dry-run=server` asks: which kinds there are, and which Secrets."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NOT_FOUND = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}


@contextlib.contextmanager
def kubernetes(
    kinds: Iterable[tuple[str, str]], namespace: str, secrets: Mapping[str, Mapping[str, str]]
) -> Iterator[str]:
    """The URL of an API server that knows `kinds`, as pairs of API version and kind, and has `secrets`, by name and
    key, in `namespace`, as a release `manta` that was there has left them."""
    answers = _discovery(kinds)
    for name, values in secrets.items():
        data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
        metadata = {
            "name": name,
            "labels": {"app.kubernetes.io/managed-by": "Helm"},
            "annotations": {"meta.helm.sh/release-name": "manta", "meta.helm.sh/release-namespace": namespace},
        }
        secret = {"kind": "Secret", "apiVersion": "v1", "metadata": metadata, "data": data}
        answers[f"/api/v1/namespaces/{namespace}/secrets/{name}"] = secret

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path.partition("?")[0])
            content = json.dumps(answer or NOT_FOUND).encode()
            self.send_response(200 if answer else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Nothing is printed."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def _discovery(kinds: Iterable[tuple[str, str]]) -> dict[str, Any]:
    by_version: dict[str, set[str]] = defaultdict(set)
    for version, kind in kinds:
        by_version[version].add(kind)
    groups, answers = [], {
        "/version": {"major": "1", "minor": "31", "gitVersion": "v1.31.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
    }  # fmt: skip
    for version, names in by_version.items():
        resources = [
            {"name": f"{kind.lower()}s", "singularName": "", "namespaced": True, "kind": kind, "verbs": ["get"]}
            for kind in sorted(names)
        ]
        answers[f"/apis/{version}" if "/" in version else f"/api/{version}"] = {
            "kind": "APIResourceList", "groupVersion": version, "resources": resources,
        }  # fmt: skip
        if "/" in version:
            group, _, number = version.partition("/")
            preferred = {"groupVersion": version, "version": number}
            groups.append({"name": group, "versions": [preferred], "preferredVersion": preferred})
    answers["/apis"] = {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    return answers
