"""Memory of CUDA ranks that all of them map, and collectives over it."""
