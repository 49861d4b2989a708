"""Which key a command sends: that of its user's own service, and to nobody else."""

import json
import os
import ssl
from pathlib import Path

import pytest

from manta.api.client import Client
from manta.api.serving.local_service import (
    CertificateUnreadable,
    announce,
    find_key,
    find_url,
    running_service,
    ssl_verification,
)
from manta.service.cluster.ray_head import RayHead
from manta.service.own_files import HomeUnusable, OwnFileUnusable
from manta.service.settings import DEFAULT_HOST, DEFAULT_PORT, Settings
from manta.service.store.location import RECORD, recorded_location
from manta.workers.paths import Paths

URL = "http://127.0.0.1:1234"


@pytest.fixture
def home(tmp_path):
    """A home whose service runs at URL, and its key."""
    announce(Settings(tmp_path).service_file, URL, "sqlite:///there")
    (tmp_path / "api.key").write_text("manta_own\n")
    (tmp_path / "api.key").chmod(0o600)
    return tmp_path


def test_key_of_the_home_is_for_the_service_that_runs_there(home):
    assert find_key(Settings(home), URL) == find_key(Settings(home), f"{URL}/") == "manta_own"
    for other in ("http://127.0.0.1:1235", "http://evil.example", "https://127.0.0.1:1234"):
        assert find_key(Settings(home), other) is None


def test_home_key_is_withheld_from_a_process_that_took_the_services_port(home):
    file = Settings(home).service_file
    file.write_text(json.dumps({**json.loads(file.read_text()), "started": "another boot/1"}))
    assert find_key(Settings(home), URL) is None


@pytest.mark.parametrize("content", [None, "", "no JSON", "[]", "{}", '{"pid": "x", "started": 1}'])
def test_malformed_service_file_counts_as_no_service(tmp_path, content):
    if content is not None:
        Settings(tmp_path).service_file.write_text(content)
    assert running_service(tmp_path) is None
    assert find_url(Settings(tmp_path)) == f"http://{DEFAULT_HOST}:{DEFAULT_PORT}"


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.write_bytes(b"\xff")])
def test_unreadable_files_in_the_home_are_ignored_or_reported_without_blocking(tmp_path, make):
    paths = Paths.of(tmp_path)
    for file in (Settings(tmp_path).service_file, paths.ray_record, paths.ray_token, tmp_path / RECORD):
        make(file)
    assert running_service(tmp_path) is None and find_url(Settings(tmp_path)) == f"http://{DEFAULT_HOST}:{DEFAULT_PORT}"
    assert RayHead(tmp_path).record() is None
    with pytest.raises(
        OwnFileUnusable, match=rf"{tmp_path / RECORD} cannot be read \(.*\): move it away, and put back"
    ):
        recorded_location(tmp_path)
    if make is Path.mkdir:
        with pytest.raises(HomeUnusable, match=rf"{paths.ray_token}: Is a directory"):
            RayHead(tmp_path)._prepare()
    else:
        RayHead(tmp_path)._prepare()
        assert len(paths.ray_token.read_text()) == 64, "what is no token is replaced"
    paths.remove_runtime_folder()


def test_unwritable_home_is_reported_with_advice(tmp_path):
    (tmp_path / "home").write_text("a file")
    with pytest.raises(HomeUnusable, match=r"the home .*home cannot be used .* in MANTA_HOME"):
        announce(Settings(tmp_path / "home").service_file, URL, "sqlite:///there")


def test_environment_key_is_used_for_any_service_url(home):
    settings = Settings.from_environment({"MANTA_HOME": str(home), "MANTA_API_KEY": "manta_other"})
    assert find_key(settings, "https://manta.example.org") == find_key(settings, URL) == "manta_other"
    assert "manta_other" not in repr(settings)


def test_client_of_a_home_uses_its_service_despite_the_environment(home, monkeypatch):
    monkeypatch.setenv("MANTA_API_KEY", "manta_of-another")
    with Client.of_home(home) as client:
        assert (client.url, client._http.headers["Authorization"]) == (URL, "Bearer manta_own")


CERTIFICATE = """
-----BEGIN CERTIFICATE-----
MIIBrjCCAVOgAwIBAgIUFqATw8c+hoHrYBf6RSZ7KWgzLUowCgYIKoZIzj0EAwIw
HDEaMBgGA1UEAwwRbWFudGEuZXhhbXBsZS5vcmcwIBcNMjYxMTIyMjIxOTA3WhgP
MjEyNjEwMjkyMjE5MDdaMBwxGjAYBgNVBAMMEW1hbnRhLmV4YW1wbGUub3JnMFkw
EwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEikiJbL0ZwjJ86BCyKjqFnzMd84bLxKde
FhIQzjTIk0L4HkDYd6lZoMrQu3lNWJVDLaE2Iib25kZhfKbmlu88DaNxMG8wHQYD
VR0OBBYEFIqBi9kchyiyRXw1dLdPC7VBToiBMB8GA1UdIwQYMBaAFIqBi9kchyiy
RXw1dLdPC7VBToiBMA8GA1UdEwEB/wQFMAMBAf8wHAYDVR0RBBUwE4IRbWFudGEu
ZXhhbXBsZS5vcmcwCgYIKoZIzj0EAwIDSQAwRgIhANg9Q82Rh2rGVODt79/amyBR
YOP/gif595KTdglF/zFLAiEAuXq6K9Nl0d4I0FBFxcdqVXykv3fv2SKQvCwKNHYw
Ou0=
-----END CERTIFICATE-----
"""
"""Of manta.example.org, signed by itself; the key to it is kept nowhere."""


def test_home_service_is_trusted_by_its_certificate_and_others_by_the_system(tmp_path):
    assert ssl_verification(Settings(tmp_path), "https://manta.example.org") is True
    assert ssl_verification(Settings(tmp_path), "http://127.0.0.1:8400") is False, "there is none"
    certificate = tmp_path / "cert.pem"
    certificate.write_text(CERTIFICATE)
    announce(Settings(tmp_path).service_file, "https://0.0.0.0:1", "sqlite:///there", certificate)
    trust = ssl_verification(Settings(tmp_path), "https://0.0.0.0:1")
    assert (trust.verify_mode, trust.check_hostname) == (ssl.CERT_REQUIRED, False)
    assert trust.cert_store_stats()["x509"] == 1, "it and no other"
    assert ssl_verification(Settings(tmp_path), "https://0.0.0.0:2") is True
    other = r"cert\.pem, the certificate of the service at .* cannot be read"
    for make in (Path.unlink, os.mkfifo, lambda path: (path.unlink(), path.touch()), lambda path: path.write_text("a")):
        make(certificate)
        with pytest.raises(CertificateUnreadable, match=other):
            ssl_verification(Settings(tmp_path), "https://0.0.0.0:1")
