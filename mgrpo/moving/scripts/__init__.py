"""Launch scripts of other trainers: the words that a script gives its trainer, and the configs of verl's and slime's."""
