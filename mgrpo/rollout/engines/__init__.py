"""The engines of one model: their states, restarts, heartbeats and loads, and the calls to all of them."""
