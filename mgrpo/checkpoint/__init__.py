"""What a run leaves behind: the model in Hugging Face format."""
