"""Mathematical answers in a text: the place of one, the value that it states, and the comparison of that value with a label."""
