"""The package that a file system of fsspec needs, from the message of fsspec."""

from __future__ import annotations

import pytest
from fsspec.registry import known_implementations

from automodel_cli.config.file_systems import package_for


@pytest.mark.parametrize(
    ("protocol", "package"),
    [("s3", "'automodel-cli[s3]'"), ("gs", "gcsfs"), ("abfs", "adlfs")],
)
def test_the_package_is_that_of_the_message(protocol: str, package: str) -> None:
    assert package_for(protocol, ImportError(known_implementations[protocol]["err"])) == package


def test_a_message_without_a_package() -> None:
    assert package_for("x", ImportError("broken")) == "the package"
