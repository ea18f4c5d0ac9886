"""Linear layers whose weights are split over a group, with their collectives overlapped, forward and backward."""
