"""The package's version, without the cost of reading installed metadata."""

__version__ = "0.1.0"
