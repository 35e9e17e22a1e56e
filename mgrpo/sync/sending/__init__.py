"""Senders, messages and units of the slices of a weight sync, and the digest that proves them."""
