"""A Ray whose autoscaler adds nodes and takes them away: on this machine, by the provider of Ray's own tests."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from manta.workers.system.sockets import outward_address
from tests.e2e.machines import SECRET_NAMES
from tests.e2e.manta import SECONDS

TYPE, MOST, SLOTS = "small", 2, 2
IDLE_SECONDS = 6
HEAD = "f" * 51 + "00000"
"""Id of the head, as the provider has it."""
OBJECT_STORE_BYTES = 80 * 2**20

_EMPTY_LISTS = (
    "cluster_synced_files",
    "initialization_commands",
    "rsync_exclude",
    "rsync_filter",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
)


class AutoscaledRay:
    """A head without room for ranks, and up to MOST nodes that come and go."""

    def __init__(self, folder: Path):
        """`folder`: for its configuration and what it prints."""
        address = outward_address()
        self._folder = Path(tempfile.mkdtemp(prefix="ray"))  # short: paths of sockets are limited
        with socket.create_server((address, 0)) as free:
            self.address = f"{address}:{free.getsockname()[1]}"
        self.token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        config = folder / "autoscaler.yaml"
        config.write_text(json.dumps(self._config()))
        options = {"port": self.address.rpartition(":")[2], "num-cpus": 0, "autoscaling-config": config,
                   "temp-dir": self._folder, "object-store-memory": OBJECT_STORE_BYTES,
                   "include-dashboard": "false"}  # fmt: skip
        environment = {**self.token, "RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0",
                       "RAY_enable_autoscaler_v2": "1", "RAY_FAKE_CLUSTER": "1",
                       "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD,
                       "RAY_CLOUD_INSTANCE_ID": HEAD,
                       "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # fmt: skip
        passed_on = {name: value for name, value in os.environ.items() if not name.startswith(SECRET_NAMES)}
        with (folder / "ray.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--head", "--block"]
                + [f"--{name}={value}" for name, value in options.items()],
                env={**passed_on, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + SECONDS
        while "Ray runtime started" not in (folder / "ray.log").read_text():  # before, it has no raylet
            assert time.monotonic() < deadline, "Ray's head did not start"
            time.sleep(0.1)

    def _config(self) -> dict[str, Any]:
        node: dict[str, Any] = {"node_config": {}, "min_workers": 0}
        worker = {"CPU": SLOTS + 1, "manta_slot": SLOTS, "object_store_memory": OBJECT_STORE_BYTES}
        provider = {"type": "external", "launch_multiple": True, "head_node_id": HEAD, "gcs_address": self.address,
                    "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
                    "disable_node_updaters": True}  # fmt: skip
        return {
            "cluster_name": "autoscaled",
            "max_workers": MOST,
            "idle_timeout_minutes": IDLE_SECONDS / 60,
            "upscaling_speed": 1.0,
            "provider": provider,
            "head_node_type": "ray.head.default",
            "available_node_types": {
                "ray.head.default": {**node, "resources": {"CPU": 0}, "max_workers": 0},
                TYPE: {**node, "resources": worker, "max_workers": MOST},
            },
            # Ray has no defaults for a provider of its tests.
            **{name: {} for name in ("auth", "docker", "file_mounts")},
            **{name: [] for name in _EMPTY_LISTS},
            "file_mounts_sync_continuously": False,
        }

    def processes(self) -> list[psutil.Process]:
        """Of all nodes."""
        mine = str(self._folder)
        started = [each for each in psutil.process_iter(["cmdline"]) if mine in " ".join(each.info["cmdline"] or ())]
        return [each for process in started for each in (process, *_children(process))]

    def close(self) -> None:
        """Leave nothing of it."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
