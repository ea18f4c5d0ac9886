"""What is kept away from the device: activations from forward to backward; shards and optimizer states at rest."""
