"""`rlx serve`: models over HTTP, in the form of OpenAI's API. One engine thread computes, an event loop talks."""
