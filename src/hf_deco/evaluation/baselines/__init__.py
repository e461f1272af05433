"""Other ways to do what this package does, to compare with."""
