from pathlib import Path

from automodel_cli.data.config import DataConfig
from automodel_cli.models.config import ModelConfig
from automodel_cli.run.checks.missing_files import missing_files
from tests.errors import assert_error


def test_random_weights_without_a_tokenizer_and_a_misspelled_folder_of_pictures(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "pictures").mkdir()
    data = DataConfig(path=str(tmp_path / "rows.jsonl"), media_dir=str(tmp_path / "picturse"), seq_len=16)
    no_tokenizer, no_folder = missing_files(ModelConfig(config={"model_type": "qwen3"}), data)
    assert_error(no_tokenizer, "missing_key", "model.tokenizer")
    assert_error(no_folder, "missing_file", "data.media_dir", fix=f"data.media_dir={tmp_path / 'pictures'}")
