"""Dataset formats: read rows as conversations, texts, prompts with completions, or preferences."""
