"""The oracle: plain torch, complete, used wherever no faster backend exists."""
