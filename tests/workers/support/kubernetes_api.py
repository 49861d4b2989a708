"""A Kubernetes API server that knows one node, with TLS and a service account, as a pod sees it."""

from __future__ import annotations

import datetime
import ipaddress
import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


class KubernetesApi:
    """Answers for node `n1` with `taints`, `conditions` and `metadata`, whoever has the `token` in `folder`; or with
    the `status`, or the `content`, where one is set."""

    def __init__(self, folder: Path):
        """`folder`: becomes that of a service account, with its token and the certificate of the authority."""
        self.taints: list[dict[str, str]] | None = None
        self.conditions: list[dict[str, str]] = []
        self.metadata: dict[str, Any] = {"name": "n1"}
        self.status, self.content = 200, b""
        self.asked: list[str] = []
        self.token = "a token"
        self.folder = folder
        key = make_certificate(folder)
        (folder / "token").write_text(f"{self.token}\n")
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                api.asked.append(self.path)
                status, content = api.answer(self.path, self.headers.get("Authorization"))
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *arguments: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "ca.crt", key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, path: str, authorization: str | None) -> tuple[int, bytes]:
        """Status and content."""
        if authorization != f"Bearer {self.token}":
            return 401, b""
        if self.status != 200 or self.content:
            return self.status, self.content
        if path.partition("?")[0] != "/api/v1/nodes/n1":
            return 404, b""
        spec = {} if self.taints is None else {"taints": self.taints}
        node = {"metadata": self.metadata, "spec": spec, "status": {"conditions": self.conditions}}
        return 200, json.dumps(node).encode()

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()


def make_certificate(folder: Path) -> Path:
    """Write `ca.crt`, of 127.0.0.1 and signed by itself, into `folder`; the file with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kubernetes")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(address, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "ca.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file = folder / "key.pem"
    pkcs8, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    key_file.write_bytes(key.private_bytes(serialization.Encoding.PEM, pkcs8, plain))
    return key_file
