"""What a layer of the model is made of, by its shape."""
