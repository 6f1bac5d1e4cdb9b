"""Moving bytes: collectives."""
