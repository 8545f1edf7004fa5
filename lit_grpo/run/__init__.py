"""What a run is to every part of the program: its folder, why it stopped, its phases, its flight records."""
