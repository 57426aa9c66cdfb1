"""The engine: input and output processing, the core and its clients."""
