"""Time limits of tests: only what hangs may meet one, on however busy a machine."""

LONGEST_S = 300.0
