"""A checkpoint's files: what they hold, whether they are whole, and how they come from the Hub."""
