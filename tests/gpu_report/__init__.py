"""`python -m tests.gpu_report`: shows on one GPU that the answers are right, and how fast they are
compared with what the card can do. Needs neither Ray nor a network nor pytest."""
