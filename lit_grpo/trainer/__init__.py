"""What Lightning's Trainer means for a run of rollouts: what is refused, what is counted, where a run is kept."""
