"""Context parallelism: attention over sequences that are split over ranks."""
