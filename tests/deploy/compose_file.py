"""Reads docker-compose.yml as far as it is used there: variables, merged keys, and each service as a record."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.records import Container, Mount

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker-compose.yml"
_VARIABLE = re.compile(r"\$(?:(?P<dollar>\$)|\{(?P<name>\w+)(?:(?P<kind>:[-?])(?P<word>[^}]*))?\})")
_UNITS = {"k": 2**10, "m": 2**20, "g": 2**30}


class MissingVariable(Exception):
    """A variable that must be set is not."""


def substituted(text: str, variables: Mapping[str, str]) -> str:
    """`text` with `${NAME}`, `${NAME:-default}` and `${NAME:?message}` replaced. Raises MissingVariable."""

    def value(match: re.Match[str]) -> str:
        if match["dollar"]:
            return "$"
        known = variables.get(match["name"], "")
        if known or match["kind"] is None:
            return known
        if match["kind"] == ":?":
            raise MissingVariable(f"{match['name']}: {match['word']}")
        return str(match["word"])

    return _VARIABLE.sub(value, text)


def required_variables(text: str) -> set[str]:
    """Those without which nothing starts."""
    return {match["name"] for match in _VARIABLE.finditer(text) if match["kind"] == ":?"}


def variables_of(text: str) -> dict[str, str]:
    """What an .env file sets."""
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return dict(line.split("=", 1) for line in lines)


def document(variables: Mapping[str, str], file: Path = FILE) -> dict[str, Any]:
    """The file with everything in its place."""
    return yaml.safe_load(substituted(file.read_text(encoding="utf-8"), variables))


def containers(variables: Mapping[str, str], profiles: tuple[str, ...] = (), file: Path = FILE) -> dict[str, Container]:
    """All that `docker compose up` with these profiles would run, by name; replicas are numbered."""
    whole = document(variables, file)
    made: dict[str, Container] = {}
    for service, words in whole["services"].items():
        if set(words.get("profiles", profiles)) <= set(profiles):
            count = words["deploy"].get("replicas")
            for name in [service] if count is None else [f"{service}-{number + 1}" for number in range(count)]:
                made[name] = _container(name, words, whole.get("secrets", {}))
    return made


def _container(name: str, words: Mapping[str, Any], secrets: Mapping[str, Any]) -> Container:
    user, _, group = str(words.get("user", "")).partition(":")
    networks = words.get("networks", {})
    addresses = [each["ipv4_address"] for each in networks.values() if each] if isinstance(networks, dict) else []
    return Container(
        name=name,
        image=words["image"],
        command=(*words.get("entrypoint", ()), *map(str, words.get("command", ()))),
        entrypoint_words=len(words.get("entrypoint", ())),
        environment={key: str(value) for key, value in words.get("environment", {}).items()},
        user=int(user) if user else None,
        group=int(group) if group else None,
        networks=frozenset(networks),
        address=addresses[0] if addresses else None,
        mounts=tuple(_mounts(words, secrets)),
        temporary=dict(_temporary(each) for each in words.get("tmpfs", ())),
        shared_memory=_bytes(words.get("shm_size", "64m")),
        read_only=words.get("read_only", False),
        capabilities=words.get("cap_drop") != ["ALL"] or bool(words.get("cap_add")),
        new_privileges="no-new-privileges:true" not in words.get("security_opt", ()),
        init=words.get("init", False),
        once=words.get("restart") == "no",
        health=tuple(words["healthcheck"]["test"][1:]) if "healthcheck" in words else None,
        needs={each: how["condition"].split("_")[1] for each, how in words.get("depends_on", {}).items()},
        published=tuple(int(each.split(":")[-2]) for each in words.get("ports", ())),
        limits={key: str(value) for key, value in words["deploy"]["resources"]["limits"].items()},
        stop_signal=words.get("stop_signal", "SIGTERM"),
    )


def _mounts(words: Mapping[str, Any], secrets: Mapping[str, Any]) -> list[Mount]:
    volumes = [each.split(":") for each in words.get("volumes", ())]
    mounts = [Mount(source, target, options == ["ro"]) for source, target, *options in volumes]
    return mounts + [Mount(secrets[each]["file"], f"/run/secrets/{each}", True) for each in words.get("secrets", ())]


def _temporary(text: str) -> tuple[str, str]:
    folder, _, options = text.partition(":")
    return folder, options


def _bytes(text: str) -> int:
    return int(text[:-1]) * _UNITS[text[-1].lower()]
