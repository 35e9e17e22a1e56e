"""Training steps, on every rank."""
