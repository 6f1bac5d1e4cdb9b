"""Building: recorded graphs become callables, compiled once, cached on disk and shared between ranks."""
