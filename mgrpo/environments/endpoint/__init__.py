"""The endpoint: a server of chats whose every turn is kept with the tokens that it was sampled after."""
