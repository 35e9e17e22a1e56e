"""The engines of one model: their states, restarts and signs of life, and the calls that go to all of them."""
