"""Records the calls of a step on a CPU once, then replays them without Python."""
