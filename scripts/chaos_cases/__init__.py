"""What scripts/chaos.py does, one part a file; each has ``main(argv) -> int``."""
