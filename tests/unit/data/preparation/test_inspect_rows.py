import numpy as np
import pytest

from automodel_cli.data.preparation.inspect_rows import MOST_REPEATED, render_document
from tests.unit.data.helpers import tiny_tokenizer


@pytest.mark.parametrize("number", [MOST_REPEATED, MOST_REPEATED + 1, 1024])
def test_a_long_run_of_a_special_token_is_one_token_and_its_number(number: int) -> None:
    tokenizer = tiny_tokenizer()
    (special,) = tokenizer.convert_tokens_to_ids([tokenizer.eos_token])
    words = tokenizer("a b", add_special_tokens=False)["input_ids"]
    ids = np.array([*words, *[special] * number, *words])
    shown = str(render_document(ids, np.zeros(len(ids), np.uint8), tokenizer, colour=False))
    run = tokenizer.eos_token * number if number == MOST_REPEATED else f"{tokenizer.eos_token} (x {number:,}) "
    text = tokenizer.decode(words)
    assert shown == f"[{text}{run}{text}]"
