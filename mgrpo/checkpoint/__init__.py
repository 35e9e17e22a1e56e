"""What a run leaves behind: its train states, to be resumed in any layout, and the model in Hugging Face format."""
