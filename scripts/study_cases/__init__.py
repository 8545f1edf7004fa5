"""What scripts/study.py runs: claims, exact calculations, runs, verdicts and the page."""
