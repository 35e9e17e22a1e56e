"""What is sent in a weight sync: which rank sends which slices, in which messages and units, and the digest that proves them."""
