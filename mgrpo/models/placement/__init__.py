"""The rows of the table: which slices of a checkpoint's tensors a parameter of a layer holds."""
