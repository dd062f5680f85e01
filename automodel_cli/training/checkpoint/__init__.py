"""Save and resume runs: sharded state, atomic publication, verification and random states."""
