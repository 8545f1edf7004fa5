"""Facts of a run that every part of the program shares: its folder, why it stopped, its phases, its flight records."""
