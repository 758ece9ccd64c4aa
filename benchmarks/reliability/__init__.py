"""Random faults at random moments of small runs."""
