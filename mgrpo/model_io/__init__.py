"""Models on disk: Hugging Face folders, Megatron folders, and the conversion between them."""
