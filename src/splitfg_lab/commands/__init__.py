"""The verbs of the command line, one file per group of them; nothing here is imported by the rest of the package."""
