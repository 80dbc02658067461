"""The routes `/v1/embeddings`, `/classify`, `/v1/score` and `/v1/rerank`."""
