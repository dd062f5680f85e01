"""Commands that build a model outside of a training run: bench, chat, doctor, plan and verify."""
