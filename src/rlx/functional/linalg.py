"""Linear algebra."""

FUNCTIONS = {}
