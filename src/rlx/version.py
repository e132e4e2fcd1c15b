"""The version of rlx, which exports, batch jobs and snapshots record."""

__version__ = "0.2.0"
