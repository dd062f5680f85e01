"""Embedding models for other tools: the base model with the folders that sentence-transformers reads.

`SentenceTransformer(folder)` runs the base model, pools, and normalizes. `AutoModel` loads the same weights.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.functional import normalize

from automodel_cli.config.errors import RunError
from automodel_cli.data.encoding.labeled import padding_id
from automodel_cli.models import transformers_compat
from automodel_cli.models.score_head import EmbeddingHead

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from automodel_cli.models.model_part import ModelPart

_MODULES = "sentence_transformers.models"


def embeddings(hidden_TD: Tensor, head: EmbeddingHead) -> Tensor:
    """Return the normalized embedding of one text, `[D]` in fp32."""
    pooled_D = hidden_TD[-1] if head.pooling == "last" else hidden_TD.float().mean(0)
    return normalize(pooled_D.float(), dim=0)


def config_of(part: ModelPart, tokenizer: PreTrainedTokenizerBase | None) -> PretrainedConfig:
    """Return the config of the export. A tokenizer without a padding token pads with EOS, which no mask reads."""
    config = copy.deepcopy(part.source_config)
    config.architectures = [type(part.model.base_model).__name__]
    if config.pad_token_id is None and tokenizer is not None:
        config.pad_token_id = padding_id(tokenizer)
    return config


def write_modules(folder: Path, head: EmbeddingHead, width: int) -> None:
    """Write the files of sentence-transformers: modules, pooling, prompts and the longest text."""
    names = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"{_MODULES}.{name}"} for i, (path, name) in enumerate(names)
    ]
    kinds = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    chosen = {"last": "lasttoken", "mean": "mean_tokens"}[head.pooling]
    pooling: dict[str, object] = {f"pooling_mode_{kind}": kind == chosen for kind in kinds}
    for path, _ in names[1:]:
        (folder / path).mkdir(exist_ok=True)
    _write(folder / "modules.json", modules)
    _write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": width, **pooling, "include_prompt": True})
    _write(folder / "sentence_bert_config.json", {"max_seq_length": head.max_tokens, "do_lower_case": False})
    prompts = {"query": head.query_prompt, "document": head.passage_prompt}
    content = {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    _write(folder / "config_sentence_transformers.json", content)


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def load_embedding_model(folder: Path | str) -> PreTrainedModel:
    """Load the base model of a folder in eval mode on the CPU, in its stored dtype. Raises RunError."""
    from transformers import AutoModel

    try:
        with transformers_compat.quiet():
            model, info = AutoModel.from_pretrained(folder, dtype="auto", output_loading_info=True)
    except Exception as error:  # any failure makes the export unusable
        raise RunError(f"folder={folder} cannot be loaded with AutoModel: {error}", code="export_mismatch") from error
    if missing := sorted(info["missing_keys"]):
        raise RunError(f"folder={folder} lacks {', '.join(missing[:3])}", code="export_mismatch")
    loaded: PreTrainedModel = model.eval()
    return loaded


def values_of(model: PreTrainedModel, row: Tensor, head: EmbeddingHead) -> Tensor:
    """Return the embedding of one row `[1, T]`, `[D]`."""
    return embeddings(model(input_ids=row, use_cache=False).last_hidden_state[0], head)
