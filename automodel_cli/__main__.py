"""`python -m automodel_cli`, which is also what every rank runs."""

from __future__ import annotations

from automodel_cli.cli.main import main

if __name__ == "__main__":
    main()
