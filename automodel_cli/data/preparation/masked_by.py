"""What decides which tokens have loss, as text for the data report."""

from __future__ import annotations

from automodel_cli.data.chat.chat_template import ChosenTemplate
from automodel_cli.data.chat.encoder import GENERATION_TAG
from automodel_cli.data.config import DataConfig


def masked_by(makes: str, template: ChosenTemplate, config: DataConfig) -> str:
    """Return the origin of the loss mask of documents of this kind."""
    if makes in ("labeled", "groups"):
        return "none, texts are compared as a whole"
    if makes == "texts":
        return "none, every token is trained"
    if template.text is None:
        return "the end of the prompt" if config.loss_mask != "all" else "none, every token is trained"
    turns = {"assistant": "assistant turns", "last_turn": "last assistant turn", "all": "all tokens"}[config.loss_mask]
    by_tags = GENERATION_TAG.search(template.text) and config.loss_mask != "all"
    way = "the template's generation tags" if by_tags else "prefix difference, verified per row"
    if template.name is not None:
        way = f"our training template for {template.name}, because the tokenizer's rewrites earlier turns"
    elif config.multi_turn == "per_turn":
        way = "what follows each turn's prompt"
    return turns if config.loss_mask == "all" else f"{way} ({turns})"
