"""Views of a compiled graph: what each launch does and costs, where it came from, its memory, pages and pictures.

Nothing here is needed to run a graph. All of it speaks to the backend protocol.
"""
