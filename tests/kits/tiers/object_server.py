"""A real object server, SeaweedFS, on loopback. `HYBRIDKV_SEAWEEDFS` holds the command of its `weed`."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

VARIABLE = "HYBRIDKV_SEAWEEDFS"
BUCKET = "fleet"
START_S = 300.0
"""It elects a leader first, and the machine may be busy."""
STOP_S = 10.0
_IDENTITIES = [
    ("owner", "AKOWNER00000", "SKOWNER00000", ["Admin", "Read", "Write", "List", "Tagging"]),
    ("tenant", "AKTENANT0000", "SKTENANT0000", ["Read:tenant", "Write:tenant", "List:tenant"]),
    ("reader", "AKREADER0000", "SKREADER0000", ["Read", "List"]),
]


def command() -> list[str] | None:
    """Command that starts `weed`; None where it is not installed."""
    return shlex.split(os.environ.get(VARIABLE, "")) or None


class ObjectServer:
    """One server, empty at first.

    Args:
        weed: the command.
        directory: for its data and its log.
        ports: where it listens, to come back where one was; empty: free ones.
    """

    def __init__(self, weed: Sequence[str], directory: Path, ports: Sequence[int] = ()) -> None:
        self.directory = directory
        self.ports = list(ports) or _free_ports(8)
        (directory / "data").mkdir(parents=True, exist_ok=True)
        identities = [
            {"name": name, "credentials": [{"accessKey": access, "secretKey": secret}], "actions": actions}
            for name, access, secret, actions in _IDENTITIES
        ]
        (directory / "s3.json").write_text(json.dumps({"identities": identities}))
        self._log: IO[bytes] = (directory / "weed.log").open("ab")
        self._process = subprocess.Popen(
            [*weed, *self._arguments()], stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def _arguments(self) -> list[str]:
        names = ("master.port", "volume.port", "filer.port", "s3.port")
        listening = [f"-{name}={port}" for name, port in zip(names, self.ports[:4], strict=True)]
        listening += [f"-{name}.grpc={port}" for name, port in zip(names, self.ports[4:], strict=True)]
        return [
            f"-logdir={self.directory}",
            "server",
            f"-dir={self.directory / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            *listening,
            "-filer",
            "-s3",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.config={self.directory / 's3.json'}",
            "-master.volumeSizeLimitMB=64",
            "-volume.max=16",
        ]

    @property
    def port(self) -> int:
        """Port of its S3 interface."""
        return self.ports[3]

    @property
    def endpoint(self) -> str:
        """URL of its S3 interface."""
        return f"http://127.0.0.1:{self.port}"

    def settings(self, who: str = "owner", endpoint: str | None = None) -> dict[str, Any]:
        """Settings of a client."""
        _, access, secret, _ = next(identity for identity in _IDENTITIES if identity[0] == who)
        keys = {"access_key_id": access, "secret_access_key": secret}
        return {"endpoint": endpoint or self.endpoint, "region": "us-east-1", **keys}

    def wait(self) -> ObjectServer:
        """Returns once it takes objects. `RuntimeError` with the end of its log if it does not."""
        import obstore
        from obstore.store import from_url

        options: Any = {"timeout": "5s", "connect_timeout": "1s", "allow_http": True}
        store = from_url(f"s3://{BUCKET}", **self.settings(), client_options=options)
        until_s = time.monotonic() + START_S
        while True:
            try:
                obstore.put(store, "is-there", b"yes", use_multipart=False)
                return self
            except Exception as failure:
                if self._process.poll() is not None or time.monotonic() > until_s:
                    self.kill()
                    log = (self.directory / "weed.log").read_text(errors="replace")
                    raise RuntimeError(f"no server: {failure}\n{log[-4000:]}") from None
                time.sleep(0.1)

    def signal(self, number: int) -> None:
        """Stops or continues the server."""
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """Ends it as a crash would."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_S)
        self._log.close()

    def __enter__(self) -> ObjectServer:
        return self.wait()

    def __exit__(self, *error: object) -> None:
        self.kill()


def _free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports
