"""deploy/Dockerfile, as a reviewer reads it; nothing is built here."""

import re
import subprocess
import sys
import tomllib

from tests.deploy.compose_file import ROOT

LINES = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()


def instructions(name):
    return [line.partition(" ")[2].strip() for line in LINES if line.startswith(f"{name} ")]


def stages():
    """Base and instructions of each stage."""
    by_name = {}
    for line in LINES:
        if line.startswith("FROM "):
            base, name = re.fullmatch(r"FROM (\S+) AS (\S+)", line).groups()
            by_name[name] = (base, [])
        elif by_name and line and not line.startswith("#"):
            by_name[name][1].append(line)
    return by_name


def user_of(stage):
    base, lines = stages()[stage]
    users = [line.partition(" ")[2] for line in lines if line.startswith("USER ")]
    return users[-1] if users else user_of(base)


def test_docker_images_run_as_an_unprivileged_user():
    assert {user_of(target) for target in ("control", "worker-cpu", "worker-cuda")} == {"10001:10001"}


def test_control_image_has_no_torch():
    extras = re.findall(r"--extra (\S+)", next(line for line in instructions("RUN") if "image_requirements.py" in line))
    options = [word for extra in extras for word in ("--extra", extra)]
    command = [sys.executable, "deploy/image_requirements.py", *options, "--without", "torch"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras == ["s3", "traces"]
    wanted = [*project["dependencies"], *(each for extra in extras for each in project["optional-dependencies"][extra])]
    assert set(wanted) - set(printed) == {each for each in wanted if each.startswith("torch>")} != set()


def test_docker_build_context_is_exactly_the_copied_files():
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [word for line in instructions("COPY") if "--from=" not in line for word in line.split()[:-1]]
    assert sorted(sent) == sorted(copied)
    assert all((ROOT / each).exists() for each in copied)
    assert "*" in (ROOT / ".dockerignore").read_text().splitlines()


def test_docker_image_layers_take_no_secrets():
    names = " ".join([*instructions("ARG"), *instructions("ENV")])
    assert not re.search(r"PASSWORD|TOKEN|SECRET|_KEY|CREDENTIAL", names)
    installs = [line for line in instructions("RUN") if "pip --python" in line]
    assert installs and all("--mount=type=secret,id=pip" in line for line in installs)


def test_docker_images_are_labelled_with_their_version():
    assert f"MANTA_VERSION={semantic_version()}" in instructions("ARG")
    (labels,) = instructions("LABEL")
    assert all(f"org.opencontainers.image.{each}=" in labels for each in ("title", "description", "version"))


def semantic_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    return re.sub(r"\.dev(\d+)$", r"-dev.\1", version)
