"""The cluster's control state (ranks, epochs, loads, waves), and the channel between processes."""
