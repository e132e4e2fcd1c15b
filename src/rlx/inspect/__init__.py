"""Inspection of compiled graphs: cost and origin of each launch, memory, web pages and pictures.

Nothing here is needed to run a graph. Everything goes through the backend protocol.
"""
