"""The endpoint: a server of chats that records each turn with its context's tokens."""
