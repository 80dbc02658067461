"""The reference backend: plain torch, complete, used wherever no faster backend exists."""
