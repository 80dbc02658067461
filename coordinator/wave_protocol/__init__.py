"""The waves in which engines that share experts step together; pure."""
