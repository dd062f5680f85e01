"""Watch a run: hangs, slow ranks, recompilation and profiles."""
