"""The command line: what is typed, read, built and, where it is wrong, answered in one screen."""
