"""The package's own rank launcher, with pytest in its server. Use it from here."""

from __future__ import annotations

from automodel_cli.launch.ranks import RankFailure, launch, launch_all, preload

preload("pytest")

__all__ = ["RankFailure", "launch", "launch_all"]
