"""Modules of a layer of the model, by its shape."""
