"""Tools of your own: plain functions that the model may call.

    automodel grpo llm -c quickstart_grpo \
        rollout.environment='{_target_: automodel_cli.rollout.environments.functions.FunctionTools, show_tools: false,
            functions: {letters: {_target_: own_tools.letters, _partial_: true}}}' --trust-package own_tools

The model calls one with `<tool_call>{"name": "letters", "arguments": {"word": "tree"}}</tool_call>`. Where the chat
template knows tools, leave `show_tools` out: it then shows what the type hints and the docstring say.
"""

from __future__ import annotations


def letters(word: str) -> str:
    """Spells a word.

    Args:
        word: what to spell
    """
    if not word.isalpha():
        raise ValueError("only letters can be spelled")  # the model is told
    return " ".join(word)
