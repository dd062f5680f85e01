"""Training on token files: packing exact, labels within documents only, and across them on request."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from automodel_cli.config.errors import ConfigError, DataError
from automodel_cli.data.batch import IGNORE_INDEX
from automodel_cli.data.config import DataConfig
from automodel_cli.data.labels import LabelSpec
from automodel_cli.data.preparation.pipeline import prepare_data
from automodel_cli.data.source_config import SourceConfig
from automodel_cli.data.token_files import megatron, nanogpt
from tests.errors import raises
from tests.unit.data.helpers import chat_row, tiny_tokenizer, write_jsonl
from tests.unit.data.token_files.test_megatron import DOCUMENTS, VECTORS, tokens

WRITTEN = [tokens(i) for i in range(len(DOCUMENTS))]


@pytest.fixture
def config(tmp_path) -> DataConfig:
    path = VECTORS / "uint16_text_document"
    return DataConfig(path=str(path), seq_len=16, cache_dir=str(tmp_path / "cache"))


def prepared(config: DataConfig, **options):
    return prepare_data(config, tiny_tokenizer(), seed=0, **options)


def pieces_of(batch) -> list[tuple[list[int], list[int]]]:
    """Ids and labels of each document of a batch."""
    ids, labels, bounds = batch.input_ids_BT.flatten(), batch.labels_BT.flatten(), batch.cu_seqlens.tolist()
    return [(ids[a:b].tolist(), labels[a:b].tolist()) for a, b in itertools.pairwise(bounds)]


def test_whole_documents_are_packed_with_their_own_labels(config):
    """A document of 31 tokens becomes two pieces that share a token. One of a single token is left out."""
    data = prepared(config)
    want = [WRITTEN[0], WRITTEN[1], WRITTEN[3], WRITTEN[4], WRITTEN[5][:16], WRITTEN[5][15:]]
    found = []
    for row in range(len(data.train)):
        for ids, labels in pieces_of(data.train.collate([row])):
            if any(label != IGNORE_INDEX for label in labels):
                found.append(ids)
                assert labels == [*ids[1:], IGNORE_INDEX]
    assert sorted(found) == sorted(want)
    assert data.report.train[0].fmt == "Megatron tokens" and data.report.train[0].num_documents == 6
    labels = sum(data.train.num_label_tokens(row) for row in range(len(data.train)))
    assert labels == sum(len(one) - 1 for one in want)
    assert {place for row in range(len(data.train)) for place in data.train.documents(row)} == {
        ("uint16_text_document.bin", number) for number in (1, 2, 4, 5, 6)
    }


def rows_of_the_stream(seq_len: int) -> list[list[list[int]]]:
    """Documents of each row, naively: `seq_len - 1` tokens of the stream, and the next one if its document goes on."""
    stream = [(number, token) for number, one in enumerate(WRITTEN) for token in one]
    rows = []
    for first in range(0, len(stream), seq_len - 1):
        part = stream[first : first + seq_len]
        if len(part) == seq_len and part[-1][0] != part[-2][0]:
            part = part[:-1]
        row = [[token for _, token in group] for _, group in itertools.groupby(part, key=lambda pair: pair[0])]
        goes_on = first > 0 and stream[first - 1][0] == part[0][0]
        rows.append(row[1:] if goes_on and len(row[0]) == 1 else row)
    return rows


@pytest.mark.parametrize("cross_documents", [False, True])
def test_wrapped_rows_are_the_stream(config, cross_documents):
    data = prepared(replace(config, packing="wrapped", cross_documents=cross_documents))
    want = rows_of_the_stream(16)
    assert len(data.train) == len(want)
    for number, documents in enumerate(want):
        batch = data.train.collate([number])
        documents = [[token for one in documents for token in one]] if cross_documents else documents
        labels = [label for one in documents for label in [*one[1:], IGNORE_INDEX]]
        length = len(labels)
        assert batch.input_ids_BT[0, :length].tolist() == [token for one in documents for token in one]
        assert batch.labels_BT[0].tolist() == labels + [IGNORE_INDEX] * (16 - length)
        assert batch.position_ids_BT[0, :length].tolist() == [i for one in documents for i in range(len(one))]
        assert batch.num_documents == len(documents) + (length < 16)
        assert data.train.num_label_tokens(number) == length - len(documents)


def test_the_second_start_reads_the_cache_and_other_tokens_do_not(config, tmp_path):
    path = tmp_path / "copy.bin"
    for suffix in (".bin", ".idx"):
        path.with_suffix(suffix).write_bytes((VECTORS / f"uint16_text_document{suffix}").read_bytes())
    config = replace(config, path=str(path))
    first = prepared(config)
    assert first.report.built and not prepared(config).report.built
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(bytes(content))
    second = prepared(config)
    assert second.report.built and second.train.contents != first.train.contents


def test_validation_documents_are_not_trained_on(config):
    data = prepared(replace(config, validation_size=2, packing="none"))
    lines = [{line for row in range(len(of)) for _, line in of.documents(row)} for of in (data.train, data.validation)]
    assert not lines[0] & lines[1] and lines[0] | lines[1] <= set(range(1, 7))


def test_token_files_and_rows_are_mixed(config, tmp_path):
    rows = write_jsonl(tmp_path / "chat.jsonl", [chat_row("hi", "yes")] * 4)
    nanogpt.write(tmp_path / "n.bin", map(np.array, WRITTEN), 0, np.dtype("uint16"))
    sources = [SourceConfig(config.path), SourceConfig(str(rows)), SourceConfig(str(tmp_path / "n.bin"))]
    data = prepared(DataConfig(datasets=sources, seq_len=64, cache_dir=config.cache_dir))
    batch = data.train.collate([0, len(data.train) - 1])
    assert batch.extra["sources_B"].tolist() == [0, 2]
    assert [part.fmt for part in data.report.train] == ["Megatron tokens", "messages, detected", "nanoGPT tokens"]
    with raises(DataError, "wrong_data_kind", keys=("data.cross_documents",)):
        crossing = replace(config, path=str(rows), packing="wrapped", cross_documents=True)
        prepared(crossing)


def test_a_folder_and_the_index_name_the_files(config, tmp_path):
    assert prepared(replace(config, path=f"{config.path}.idx")).train.contents == prepared(config).train.contents
    for number in range(2):
        megatron.write(tmp_path / f"{number}.bin", [np.array([11, 12, 13])], np.dtype("int32"))
    assert len(prepared(replace(config, path=str(tmp_path), packing="none")).train) == 2


def test_what_does_not_fit_is_rejected(config, tmp_path):
    for options in ({"preferences": True}, {"row_spec": LabelSpec("single_label_classification", ("good", "bad"))}):
        with raises(DataError, "wrong_data_kind"):
            prepared(config, **options)
    with raises(DataError, "no_effect", keys=("data.format",)):
        prepared(replace(config, format="text"))
    with raises(ConfigError, "requires_setting", fix="data.packing=wrapped"):
        replace(config, cross_documents=True)
    megatron.write(tmp_path / "other.bin", [np.array([11, 298])], np.dtype("int32"))
    with raises(DataError, "vocabulary_mismatch", values=("298",)):
        prepared(replace(config, path=str(tmp_path / "other.bin")))
    Path(tmp_path / "unknown.bin").write_bytes(bytes(2000))
    with raises(DataError, "unsupported_file_type"):
        prepared(replace(config, path=str(tmp_path / "unknown.bin")))
