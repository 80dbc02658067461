"""`swell doctor`: facts of every host are collected there, and judged here by pure functions."""
