"""What stands for the images of docker-compose.yml and of the chart where there is no engine: programs of this machine,
with the environment of the image, and what its entrypoint does before the command."""

from __future__ import annotations

import re
import shutil
import site
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.machines import ROOT
from tests.service.support.postgresql_server import NOT_FOUND, programs

_START_POSTGRES = """
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    printf %s "$POSTGRES_PASSWORD" >/tmp/password
    initdb --no-sync --no-instructions --username="$POSTGRES_USER" --pwfile=/tmp/password $POSTGRES_INITDB_ARGS
    rm /tmp/password
    echo "CREATE DATABASE $POSTGRES_DB" | postgres --single postgres
    printf '%s\n' "listen_addresses = '*'" "fsync = off" >>"$PGDATA/postgresql.conf"
    echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
fi
exec "$@"
"""
"""What the image's own entrypoint does. Without fsync: nothing here has to outlive the machine."""


@dataclass(frozen=True)
class Image:
    """What a container finds in it."""

    environment: Mapping[str, str]
    folder: str = "/"
    """Where its command starts."""
    entrypoint: tuple[str, ...] = ()
    """Words before the container's command."""
    arguments: tuple[str, ...] = ()
    """Its command where the container has none."""
    command: tuple[str, ...] | None = None
    """Where another program stands for the image's: its whole command."""
    health: tuple[str, ...] | None = None
    """The same of its health check."""
    folders: tuple[str, ...] = ()
    """Those of its user."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Folders of this machine that it has at other paths."""
    hidden: tuple[Path, ...] = ()
    """What is installed here, and not there."""


def image_of(name: str) -> Image | None:
    """The image `name`, which may have a tag; None where nothing here can stand for it."""
    repository = name.rpartition(":")[0] or name
    path = {"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/bin"}
    if repository.startswith("manta/"):
        return _of_dockerfile(repository.removeprefix("manta/"))
    if repository == "postgres":
        folder = programs()
        inside = {"PATH": f"{folder}:{path['PATH']}", "PGDATA": "/var/lib/postgresql/data"}
        return Image(inside, entrypoint=("sh", "-ec", _START_POSTGRES, "postgres"), arguments=("postgres",))
    if repository == "versity/versitygw":  # moto's server, which keeps objects in memory and takes any credentials
        server = (sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", "9000")
        return Image(path, command=server, health=("wget", "-q", "-O", "/dev/null", "http://127.0.0.1:9000/moto-api/"))
    return Image(path) if repository in ("haproxy", "prom/prometheus") else None


def missing_programs() -> list[str]:
    """Why containers cannot be run here; none where they can."""
    needed = {each: each for each in ("haproxy", "openssl", "prometheus", "tini", "wget")} | {"nft": "nftables"}
    missing = [f"there is no {each} (Debian: apt-get install {package})" for each, package in needed.items()
               if shutil.which(each) is None]  # fmt: skip
    return missing + ([] if programs() else [NOT_FOUND])


def _of_dockerfile(target: str) -> Image:
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    common = text.partition(" AS labelled\n")[2].partition("\nFROM ")[0]
    environment = dict(word.split("=", 1) for line in re.findall(r"^ENV (.*)$", common, re.M) for word in line.split())
    (folder,) = set(re.findall(r"^WORKDIR (/var.*)$", text, re.M))
    torch = [Path(each) / "torch" for each in site.getsitepackages()] if target == "control" else []
    (folders,) = re.findall(r"install --directory .*--mode=0700 (.*)", text)
    return Image(
        environment,
        folder,
        folders=tuple(folders.split()),
        links={"/opt/manta": sys.prefix},
        hidden=tuple(each for each in torch if each.is_dir()),
    )
