"""Mathematical answers in a text: the place where one stands, what it states, and whether that is a label's value."""
