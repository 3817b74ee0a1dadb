"""A real S3 server (moto's) on a free port of this machine, which can be told to fail."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import boto3
import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

SECRET = "s3cr3t-of-the-tests"
BUSY = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


class S3Server:
    """`refuse`: called with (method, path) of each request; True answers 503."""

    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.refuse: Callable[[str, str], bool] | None = None
        self.requests: list[tuple[str, str]] = []
        self._thread = threading.Thread(target=self._server.serve_forever, name="s3", daemon=True)
        self._thread.start()
        self._client = boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id="tests",
            aws_secret_access_key=SECRET,
        )

    def bucket(self) -> str:
        """A new bucket's name."""
        name = f"b{uuid.uuid4().hex[:12]}"
        self.client().create_bucket(Bucket=name)
        return name

    def client(self) -> Any:
        """boto3's."""
        return self._client

    def keys(self, bucket: str) -> list[str]:
        return sorted(o["Key"] for o in self.client().list_objects_v2(Bucket=bucket).get("Contents", []))

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(timeout=10)
        self._server.server_close()

    def configure(self, patch: pytest.MonkeyPatch) -> None:
        """Environment variables by which every client finds this server."""
        patch.setenv("AWS_ENDPOINT_URL", self.url)
        patch.setenv("AWS_ACCESS_KEY_ID", "tests-key-id")
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path))
        if self.refuse is not None and self.refuse(method, path):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start(
                "503 Service Unavailable",
                [("Content-Type", "application/xml"), ("Content-Length", str(len(BUSY)))],
            )
            return [b"" if method == "HEAD" else BUSY]
        return self._app(environ, start)
