"""Loaded models: text generation, embeddings and image features."""
