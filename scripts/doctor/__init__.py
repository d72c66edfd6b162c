"""What `paceline doctor` looks at."""
