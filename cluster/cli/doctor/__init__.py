"""`swell doctor`: facts of every host are collected there, and checked here by pure functions."""
