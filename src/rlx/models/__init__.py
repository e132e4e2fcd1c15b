"""Model families: one page each."""
