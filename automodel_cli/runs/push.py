"""Push the export of a run to the Hugging Face hub."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from automodel_cli.config.errors import RunError
from automodel_cli.config.fix_syntax import word
from automodel_cli.report.loss_curve import loss_curve_svg
from automodel_cli.runs.index import RunEntry
from automodel_cli.runs.model_card import CONFIG, model_card
from automodel_cli.runs.report_page import CURVE


@contextmanager
def staged(run: RunEntry, export: Path, *, licence: str | None, base_model: str | None) -> Iterator[Path]:
    """Create a folder with the files to upload: export (as links), card, curve and config. Raises RunError if the run
    has no export."""
    if not (export / "README.md").is_file():
        raise RunError(
            f"{run.folder} has no export to push", code="no_export", fix=f"automodel export {word(run.folder)}"
        )
    with tempfile.TemporaryDirectory(prefix="automodel-push-") as name:
        folder = Path(name)
        for path in sorted(export.rglob("*")):
            target = folder / path.relative_to(export)
            if path.is_dir():
                target.mkdir()
            elif path != export / "README.md":
                os.symlink(path.resolve(), target)
        (folder / "README.md").write_text(
            model_card(run, export, licence=licence, base_model=base_model), encoding="utf-8"
        )
        (folder / CURVE).write_text(loss_curve_svg(run.rows, title=run.name), encoding="utf-8")
        shutil.copyfile(run.folder / "config.yaml", folder / CONFIG)
        yield folder


def upload(folder: Path, repository: str, *, private: bool) -> str:
    """Create the repository if necessary, and commit the folder to it. Returns its URL. Raises RunError."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    api = HfApi()
    try:
        created = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=created.repo_id, folder_path=folder, commit_message="Upload model")
    except OfflineModeIsEnabled as error:
        raise RunError(
            f"{repository} cannot be pushed, because HF_HUB_OFFLINE is set",
            code="invalid_environment",
            keys=("HF_HUB_OFFLINE",),
            fix="unset HF_HUB_OFFLINE, or --dry-run",
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "?"
        fix = "hf auth login" if status in (401, 403) else None
        raise RunError(
            f"the hub rejected {repository} (status {status}): {str(error).splitlines()[0]}",
            code="server_rejected",
            fix=fix,
        ) from error
    except (ValueError, OSError) as error:
        raise RunError(
            f"{repository} could not be pushed: {str(error).splitlines()[0]}", code="server_unreachable"
        ) from error
    return str(created)
