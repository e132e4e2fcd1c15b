"""Models at work: generation and embeddings."""
