from automodel_cli.config.errors import ConfigError
from automodel_cli.data.source_config import check_format
from tests.errors import raises


def test_columns_of_pictures_cannot_be_mapped() -> None:
    with raises(ConfigError, "not_supported", keys=("column_mapping",), values=("images", "photos")):
        check_format("auto", {"images": "photos"})
