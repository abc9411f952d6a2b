"""The verbs of the command line, one module per group; no other package imports them."""
