"""Conversations: chat templates, loss masks, turn ends, special tokens and checks of rendered texts."""
