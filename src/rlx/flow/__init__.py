"""Assembling models from stages."""
