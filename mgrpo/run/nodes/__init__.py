"""`mgrpo launch`: one run on many nodes, started by one program on each of them."""
