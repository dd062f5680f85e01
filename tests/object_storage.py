"""A local S3 server for tests of object storage."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
import pytest


@contextmanager
def s3_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Start a server that takes any credentials, and yield the URL of an empty bucket. Skips without moto and s3fs."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    forget = urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")
    urllib.request.urlopen(forget).close()  # what it stores outlives a server: it is the process's
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    fsspec.filesystem("s3").clear_instance_cache()
    fsspec.filesystem("s3").mkdir("bucket")
    yield "s3://bucket"
    server.stop()
