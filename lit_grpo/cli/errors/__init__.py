"""What is wrong with a configuration: found from signatures in a second, shown with its line and a remedy."""
