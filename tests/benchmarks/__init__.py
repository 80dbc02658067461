"""Measurements that last: `make bench` runs the cases, alone or against peers."""
