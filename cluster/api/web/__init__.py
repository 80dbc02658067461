"""The page of the server for browsers: a playground, the cluster, and the API documentation."""
