"""Process groups: ranks, secrets, stores and collectives."""
