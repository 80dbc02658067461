"""The live state of the cluster, as a stream of events for operators."""
