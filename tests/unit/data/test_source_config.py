from automodel_cli.config.errors import ConfigError
from automodel_cli.data.source_config import check_format
from tests.errors import raises


def test_the_fix_for_a_misspelt_field_keeps_the_other_entries() -> None:
    check_format("auto", {"messages": "chat", "images": "photos"})
    fix = "data.column_mapping='{messages: chat, images: photos}'"
    with raises(ConfigError, "unknown_name", keys=("column_mapping",), fix=fix):
        check_format("auto", {"messages": "chat", "image": "photos"})
