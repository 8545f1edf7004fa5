"""What a person sees of a run: the progress of a fit, the panels at its start and end, and what is kept from them."""
